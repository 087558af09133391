"""The catalog in a file of SQLite, which is that of one store."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from loraplex.adapter_store.adapter_changes import NAME_IN, ROWS_OF
from loraplex.adapter_store.database import Database, steps_after
from loraplex.adapter_store.records import Rows
from loraplex.adapter_store.storage import DataDirectoryError, disk_full

_COLUMNS = """
SELECT tables.name, columns.name FROM sqlite_master AS tables, pragma_table_info(tables.name) AS columns
WHERE tables.type = 'table'
"""


class EmbeddedDatabase(Database):
    """A file of SQLite, with one connection. A catalog of an earlier version gets the steps that it lacks.

    Raises DataDirectoryError, also where there are `blobs` of a catalog that is missing: it would have them removed.
    """

    def __init__(self, path: Path, blobs: int = 0) -> None:
        super().__init__()
        try:
            with ExitStack() as opened:
                connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                opened.callback(connection.close)
                connection.row_factory = sqlite3.Row
                # In WAL mode with FULL every commit is on the disk before it returns.
                # With secure_delete removed rows are overwritten.
                for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "secure_delete = ON"):
                    connection.execute(f"PRAGMA {pragma}")
                _migrate(connection, path, blobs)
                _check_shape(connection, path)
                _watch(connection, self.adapter_changes.note)
                opened.pop_all()
        except sqlite3.Error as error:
            raise DataDirectoryError(f"--data: {path} cannot be opened as the catalog: {error}") from error
        self._connection = connection

    @contextmanager
    def transaction(self) -> Iterator[Rows]:
        with self.lock:
            committed = False
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
                committed = True
            except BaseException as error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                    raise disk_full() from error
                raise
            finally:
                self.adapter_changes.end_transaction(committed=committed)

    @contextmanager
    def reading(self) -> Iterator[Rows]:
        with self.lock:
            yield self._connection

    def follow(self, changed: Callable[[Set[str] | None], None]) -> None:
        """Do nothing: no other store changes the file."""

    def forget_removed(self) -> None:
        """Write the removal of rows into the file itself, and empty the journal, which still has them."""
        with self.lock:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def numbers(self) -> dict[str, int]:
        with self.reading() as rows:
            return dict(rows.execute("SELECT name, seq FROM sqlite_sequence").fetchall())

    def set_numbers(self, rows: Rows, numbers: dict[str, int]) -> None:
        rows.execute("DELETE FROM sqlite_sequence")
        rows.executemany("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", numbers.items())

    def close(self) -> None:
        with self.lock:
            self._connection.close()


def open_database(url: str, path: Path, blobs: int = 0) -> Database:
    """Open the catalog of so many files at a URL of PostgreSQL, or without one at a path. Raises DataDirectoryError."""
    if not url:
        return EmbeddedDatabase(path, blobs)
    from loraplex.adapter_store.postgres import PostgresDatabase

    return PostgresDatabase(url, blobs)


def _migrate(connection: sqlite3.Connection, path: Path, blobs: int) -> None:
    """Run the migrations that the catalog lacks, each in a transaction."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    for number, step in steps_after(version, f"--data: {path}", blobs).items():
        connection.executescript(f"BEGIN; {step}; PRAGMA user_version = {number}; COMMIT;")


def _check_shape(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a catalog with other tables than its version has now: before 1.0 step 1 was changed in its place."""
    with closing(sqlite3.connect(":memory:")) as new:
        new.executescript(";".join(steps_after(0, "").values()))
        lacking = set(new.execute(_COLUMNS)).difference(map(tuple, connection.execute(_COLUMNS)))
    if lacking:
        tables = ", ".join(sorted({table for table, _ in lacking}))
        message = f"is of a version before 1.0: it lacks {tables}, or columns of these; begin with an empty directory"
        raise DataDirectoryError(f"--data: {path} {message}")


def _watch(connection: sqlite3.Connection, note: Callable[[str | None], None]) -> None:
    """Note the adapters that are changed through a connection of SQLite."""
    connection.create_function("note_adapter", 1, note)
    for table, name in NAME_IN.items():
        for event, row in ROWS_OF.items():
            connection.execute(
                f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON main.{table} "
                f"BEGIN SELECT note_adapter({name.format(row=row)}); END"
            )
