"""The revisions of deleted adapters, which answers that run may still need. Blocks: call it in a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from loraplex.adapter_store.database import Database
from loraplex.adapter_store.records import Revision, Rows, to_revision
from loraplex.adapter_store.storage import DataDirectory
from loraplex.contracts.artifacts.names import AdapterName, RevisionName

_COLUMNS = (
    "number, digest, base_digest, rank, config_digest, config_bytes, weights_digest, weights_bytes, "
    "{0}create_ns, tenant, adapter, base_model"
)


class DeletedRevisions:
    """The revisions of deleted adapters, whose files can still be downloaded for `keep_s` seconds.

    A name means nothing from the deletion on. But a request keeps the revision that it was resolved to, and another
    worker may have to fetch it when the answer goes on there.
    """

    def __init__(
        self, database: Database, data: DataDirectory, keep_s: float, *, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self.database = database
        self.data = data
        self._keep_ns = round(keep_s * 1e9)
        self._clock = clock

    def take(self, rows: Rows, adapter_id: int, digest: str = "") -> None:
        """Record revisions of an adapter as deleted, which the caller deletes in the same transaction; or only one."""
        rows.execute(
            f"INSERT INTO deleted_revisions ({_COLUMNS.format('')}, delete_ns) "
            f"SELECT {_COLUMNS.format('revisions.')}, ? FROM revisions JOIN adapters ON adapters.id = adapter_id "
            "WHERE adapter_id = ? AND ? IN ('', digest) ON CONFLICT (tenant, adapter, digest) DO UPDATE SET "
            + ", ".join(f"{column} = excluded.{column}" for column in (*_COLUMNS.format("").split(", "), "delete_ns")),
            (self._clock(), adapter_id, digest),
        )

    def find(self, rows: Rows, name: RevisionName) -> Revision | None:
        """Return a deleted revision that may still be downloaded."""
        row = rows.execute(
            "SELECT * FROM deleted_revisions WHERE tenant = ? AND adapter = ? AND digest = ? AND delete_ns > ?",
            (name.tenant, name.adapter, name.digest, self._clock() - self._keep_ns),
        ).fetchone()
        return None if row is None else to_revision(row)

    def purge(self, *, everything: bool = False, name: AdapterName | None = None) -> int:
        """Remove the revisions whose time has passed, or all of them, or all of an adapter; returns how many."""
        until = self._clock() if everything else self._clock() - self._keep_ns
        where, values = "delete_ns <= ?", list[int | str]([until])
        if name is not None:
            where, values = "tenant = ? AND adapter = ?", [name.tenant, name.adapter]
        return self._remove(where, values)

    def trim(self, tenant: str, most_bytes: int) -> int:
        """Remove a tenant's revisions beyond so many bytes, those deleted first; returns how many."""
        upto = "sum(config_bytes + weights_bytes) OVER (ORDER BY delete_ns DESC, number DESC)"
        latest = f"SELECT number, {upto} AS upto FROM deleted_revisions WHERE tenant = ?"
        return self._remove(f"number IN (SELECT number FROM ({latest}) AS latest WHERE upto > ?)", [tenant, most_bytes])

    def _remove(self, where: str, values: Sequence[int | str]) -> int:
        digests: set[str] = set()
        with self.database.swept(self.data, digests), self.database.transaction() as rows:
            removed = rows.execute(
                f"SELECT config_digest, weights_digest FROM deleted_revisions WHERE {where}", values
            ).fetchall()
            rows.execute(f"DELETE FROM deleted_revisions WHERE {where}", values)
            digests.update(digest for revision in removed for digest in revision)
        return len(removed)
