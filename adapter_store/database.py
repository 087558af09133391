"""The catalog's SQLite file: transactions that are durable when they end.

Its calls block: make them in a thread.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from adapter_store.schema import LATER_TABLES, SCHEMA, VERSION
from adapter_store.storage import DataDirectoryError, disk_full

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
                self._connection.executescript(SCHEMA)
            if version in {0, VERSION}:
                self._connection.executescript(LATER_TABLES)
        except sqlite3.Error as error:
            raise DataDirectoryError(f"--data: {path} cannot be opened as the catalog: {error}") from error
        if version not in {0, VERSION}:
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
