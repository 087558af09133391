"""Revisions with a time to live, as training runs push them, and adapters that are left without any.

A file of its own because the catalog is long; like the catalog it blocks: call it in a thread.
"""

from __future__ import annotations

import time

from adapter_store.catalog import Catalog, DeletedRevisions, end_grants, touch
from adapter_store.database import Database
from artifacts.names import AdapterName

# Revisions whose time has passed, and that neither an alias nor a release that has not ended has.
_EXPIRED = """
SELECT number, adapter_id, digest, tenant, adapter FROM revisions JOIN adapters ON adapters.id = adapter_id
WHERE expire_ns <= ?
AND NOT EXISTS (SELECT 1 FROM aliases WHERE aliases.adapter_id = adapters.id AND aliases.digest = revisions.digest)
AND NOT EXISTS (
    SELECT 1 FROM releases WHERE releases.adapter_id = adapters.id AND releases.digest = revisions.digest
    AND state NOT IN ('retired', 'rolled back')
) ORDER BY number
"""


def remove_expired(database: Database, catalog: Catalog, deleted: DeletedRevisions) -> int:
    """Delete the revisions whose time has passed; returns how many. Answers that run on them go on."""
    now = time.time_ns()
    with database.reading() as rows:
        if rows.execute(_EXPIRED, (now,)).fetchone() is None:
            return 0
    with database.transaction() as rows:
        expired = rows.execute(_EXPIRED, (now,)).fetchall()
        for row in expired:
            deleted.take(rows, row["adapter_id"], row["digest"])
            rows.execute("DELETE FROM revisions WHERE number = ?", (row["number"],))
            emptied = rows.execute(
                "DELETE FROM adapters WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM revisions WHERE adapter_id = ?1)",
                (row["adapter_id"],),
            )
            if emptied.rowcount:
                end_grants(rows, AdapterName(row["tenant"], row["adapter"]), now)
            else:
                touch(rows, row["adapter_id"], now)
    catalog.free({row["tenant"] for row in expired})
    return len(expired)
