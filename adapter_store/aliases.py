"""Writes the catalog's rows of aliases, within the caller's transaction."""

from __future__ import annotations

import sqlite3

from rpc.errors import InvalidField

# Maximum number of aliases of an adapter, so that one answer can list them.
_MAX_ALIASES = 100


def set_alias(rows: sqlite3.Connection, adapter_id: int, alias: str, digest: str) -> bool:
    """Point the alias at the digest; returns whether it pointed elsewhere."""
    aliases = dict(rows.execute("SELECT alias, digest FROM aliases WHERE adapter_id = ?", (adapter_id,)).fetchall())
    if aliases.get(alias) == digest:
        return False
    if alias not in aliases and len(aliases) >= _MAX_ALIASES:
        raise InvalidField("alias", f"the adapter has {_MAX_ALIASES} aliases already; remove one first")
    rows.execute(
        "INSERT OR REPLACE INTO aliases (adapter_id, alias, digest) VALUES (?, ?, ?)", (adapter_id, alias, digest)
    )
    return True


def remove_alias(rows: sqlite3.Connection, adapter_id: int, alias: str) -> bool:
    """Remove the alias; returns whether there was one."""
    found = rows.execute("DELETE FROM aliases WHERE adapter_id = ? AND alias = ?", (adapter_id, alias))
    return found.rowcount > 0
