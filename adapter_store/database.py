"""The catalog's SQLite file: schema, and transactions that are durable when they end.

Its calls block: make them in a thread.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from adapter_store.storage import DataDirectoryError, disk_full

_VERSION = 1
_SCHEMA = f"""
BEGIN;
CREATE TABLE adapters (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    base_model TEXT NOT NULL,
    create_ns INTEGER NOT NULL,
    update_ns INTEGER NOT NULL,
    changes INTEGER NOT NULL,
    UNIQUE (tenant, adapter)
);
CREATE TABLE revisions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    adapter_id INTEGER NOT NULL REFERENCES adapters (id) ON DELETE CASCADE,
    digest TEXT NOT NULL,
    base_digest TEXT NOT NULL,
    rank INTEGER NOT NULL,
    config_digest TEXT NOT NULL,
    config_bytes INTEGER NOT NULL,
    weights_digest TEXT NOT NULL,
    weights_bytes INTEGER NOT NULL,
    create_ns INTEGER NOT NULL,
    UNIQUE (adapter_id, digest)
);
CREATE INDEX revisions_by_config ON revisions (config_digest);
CREATE INDEX revisions_by_weights ON revisions (weights_digest);
CREATE TABLE aliases (
    adapter_id INTEGER NOT NULL,
    alias TEXT NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY (adapter_id, alias),
    FOREIGN KEY (adapter_id, digest) REFERENCES revisions (adapter_id, digest) ON DELETE CASCADE
);
CREATE TABLE base_models (
    name TEXT PRIMARY KEY,
    digest TEXT NOT NULL,
    manifest TEXT NOT NULL,
    create_ns INTEGER NOT NULL
);
CREATE TABLE base_files (
    model TEXT NOT NULL REFERENCES base_models (name) ON DELETE CASCADE,
    name TEXT NOT NULL,
    digest TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (model, name)
);
CREATE INDEX base_files_by_digest ON base_files (digest);
PRAGMA user_version = {_VERSION};
COMMIT;
"""
# Tables of later than the schema's version, which stays the same: an older store leaves them alone.
_DELETED_REVISIONS = """
CREATE INDEX IF NOT EXISTS revisions_by_digest ON revisions (digest);
CREATE TABLE IF NOT EXISTS deleted_revisions (
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    digest TEXT NOT NULL,
    number INTEGER NOT NULL,
    base_model TEXT NOT NULL,
    base_digest TEXT NOT NULL,
    rank INTEGER NOT NULL,
    config_digest TEXT NOT NULL,
    config_bytes INTEGER NOT NULL,
    weights_digest TEXT NOT NULL,
    weights_bytes INTEGER NOT NULL,
    create_ns INTEGER NOT NULL,
    delete_ns INTEGER NOT NULL,
    PRIMARY KEY (tenant, adapter, digest)
);
CREATE INDEX IF NOT EXISTS deleted_by_config ON deleted_revisions (config_digest);
CREATE INDEX IF NOT EXISTS deleted_by_weights ON deleted_revisions (weights_digest);
"""
_CERTIFICATES = """
CREATE TABLE IF NOT EXISTS certificates (
    adapter_id INTEGER NOT NULL,
    digest TEXT NOT NULL,
    base_digest TEXT NOT NULL,
    quantization TEXT NOT NULL,
    prompts INTEGER NOT NULL,
    drawn INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    agreement REAL NOT NULL,
    mean_kl REAL NOT NULL,
    max_kl REAL NOT NULL,
    create_ns INTEGER NOT NULL,
    PRIMARY KEY (adapter_id, digest, base_digest, quantization),
    FOREIGN KEY (adapter_id, digest) REFERENCES revisions (adapter_id, digest) ON DELETE CASCADE
);
"""
# API keys, as deleted revisions. `change` grows with every change of a key: routers ask for what came after theirs.
_API_KEYS = """
CREATE TABLE IF NOT EXISTS api_keys (
    key_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    role TEXT NOT NULL,
    scopes TEXT NOT NULL,
    label TEXT NOT NULL,
    create_ns INTEGER NOT NULL,
    expire_ns INTEGER,
    revoke_ns INTEGER,
    change INTEGER NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS api_keys_by_change ON api_keys (change);
CREATE TABLE IF NOT EXISTS api_key_secrets (
    key_id TEXT NOT NULL REFERENCES api_keys (key_id) ON DELETE CASCADE,
    sha256 BLOB NOT NULL,
    create_ns INTEGER NOT NULL,
    expire_ns INTEGER,
    PRIMARY KEY (key_id, sha256)
);
"""
# Tenants that may use another's adapter. By names, so that a grant outlives the adapter for the answers that run.
_GRANTS = """
CREATE TABLE IF NOT EXISTS grants (
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    grantee TEXT NOT NULL,
    create_ns INTEGER NOT NULL,
    expire_ns INTEGER,
    end_ns INTEGER,
    PRIMARY KEY (tenant, adapter, grantee)
);
CREATE INDEX IF NOT EXISTS grants_by_grantee ON grants (grantee);
"""
# Plans by name, as JSON; none where one was deleted, which readers learn by its change, as those of keys.
_PLANS = """
CREATE TABLE IF NOT EXISTS plans (
    name TEXT PRIMARY KEY,
    plan TEXT,
    change INTEGER NOT NULL
);
"""
_BLOBS = """
SELECT config_digest FROM revisions UNION SELECT weights_digest FROM revisions UNION SELECT digest FROM base_files
UNION SELECT config_digest FROM deleted_revisions UNION SELECT weights_digest FROM deleted_revisions
"""
_IS_REFERENCED = """
SELECT EXISTS (SELECT 1 FROM revisions WHERE config_digest = :digest)
    OR EXISTS (SELECT 1 FROM revisions WHERE weights_digest = :digest)
    OR EXISTS (SELECT 1 FROM base_files WHERE digest = :digest)
    OR EXISTS (SELECT 1 FROM deleted_revisions WHERE config_digest = :digest)
    OR EXISTS (SELECT 1 FROM deleted_revisions WHERE weights_digest = :digest)
"""


class Database:
    """A connection that one thread uses at a time. `lock` may be held around several transactions.

    Raises DataDirectoryError, also where there are `blobs` of a catalog that is missing: it would have them removed.
    """

    def __init__(self, path: Path, blobs: int = 0) -> None:
        self.lock = threading.RLock()
        if blobs and not (path.is_file() and path.stat().st_size):
            raise _lost_catalog(path, blobs)
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._connection.row_factory = sqlite3.Row
            # In WAL mode with FULL every commit is on the disk before it returns.
            # With secure_delete removed rows are overwritten.
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "secure_delete = ON"):
                self._connection.execute(f"PRAGMA {pragma}")
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0 and blobs:
                self._connection.close()
                raise _lost_catalog(path, blobs)
            if version == 0:
                self._connection.executescript(_SCHEMA)
            if version in {0, _VERSION}:
                self._connection.executescript(_DELETED_REVISIONS + _CERTIFICATES + _API_KEYS + _GRANTS + _PLANS)
        except sqlite3.Error as error:
            raise DataDirectoryError(f"--data: {path} cannot be opened as the catalog: {error}") from error
        if version not in {0, _VERSION}:
            self._connection.close()
            raise DataDirectoryError(f"--data: {path} was written by another version of the store")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction: all of it happens or nothing, and it is on disk when it ends.

        Raises Exhausted on a full disk.
        """
        with self.lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException as error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                    raise disk_full() from error
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction that reads: all that it reads belongs to the same moment."""
        with self.lock:
            yield self._connection

    def referenced_blobs(self) -> set[str]:
        """Return the digests of all blobs that a row needs."""
        with self.reading() as rows:
            return {row[0] for row in rows.execute(_BLOBS)}

    def unreferenced(self, digests: Iterable[str]) -> list[str]:
        """Return which of these blobs no row needs any more."""
        with self.reading() as rows:
            return [digest for digest in digests if not rows.execute(_IS_REFERENCED, {"digest": digest}).fetchone()[0]]

    def forget_removed(self) -> None:
        """Write the removal of rows into the file itself, and empty the journal, which still has them."""
        with self.lock:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connection."""
        with self.lock:
            self._connection.close()


def _lost_catalog(path: Path, blobs: int) -> DataDirectoryError:
    return DataDirectoryError(
        f"--data: {path} is missing or empty, but there are {blobs} files in {path.parent / 'blobs'}: "
        "restore the catalog from a backup, or move the files away to begin with an empty store"
    )
