"""`loraplex backup --from PLACE... --to PLACE...`: copies all that a store keeps, while it runs.

A place is a store's directory, bucket and database, as in `--data`, `--bucket` and `--database`. The copy is one that a
store can run on: so the same command restores it, and moves files into a bucket, or a catalog into a database. What the
copy has is of one moment: the catalog is read first, and the files that it names after it; if one has gone, it begins
again.
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loraplex.adapter_store.bucket import BucketDirectory, open_bucket
from loraplex.adapter_store.database import BLOBS, Database
from loraplex.adapter_store.embedded import EmbeddedDatabase, open_database
from loraplex.adapter_store.records import Blob, Rows, marks
from loraplex.adapter_store.storage import BlobReader, CorruptBlob, DataDirectory, DataDirectoryError
from loraplex.runtime.rpc.errors import Unavailable

# Number of times that the copy begins again because a file has gone.
_TRIES = 5
# Timeout in seconds of a request for a file.
_BLOB_S = 3600.0
# In the order in which they were made: one that refers to another comes after it.
_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY rowid"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a store keeps things; empty: it has none."""

    directory: str = ""
    bucket: str = ""
    database: str = ""

    @property
    def files(self) -> str:
        """Return where the files are."""
        return self.bucket or self.directory


def place(flag: str, names: Sequence[str]) -> Place:
    """Return the place of these names. Raises DataDirectoryError where one is missing, or there twice."""
    values = dict[str, str]()
    for name in names:
        kind = "database" if name.startswith("postgres") else "bucket" if "://" in name else "directory"
        values[kind] = name
    if len(values) < len(names) or ("directory" not in values and len(values) < 2):
        raise DataDirectoryError(f"{flag}: give a directory, or a bucket and a postgresql:// URL, or one of each")
    return Place(**values)


def copy(origin: Place, destination: Place) -> int:
    """Copy a place to an empty one; returns the number of files. Files that are in the same place stay there.

    Raises DataDirectoryError, CorruptBlob, Unavailable.
    """
    with ExitStack() as opened:
        work = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-backup-")))
        moves = origin.files != destination.files
        data, database = opened.enter_context(_empty(destination, work / "to", moves))
        for attempt in range(_TRIES):
            catalog = opened.enter_context(closing(_read_catalog(origin, work / f"catalog{attempt}.db")))
            with catalog.reading() as rows:
                blobs = [Blob(*row) for row in rows.execute(BLOBS)]
            try:
                if moves:
                    with _opener(origin, catalog, work / "from") as open_file:
                        _copy_files(open_file, blobs, data, database)
                break
            except CorruptBlob:
                if attempt == _TRIES - 1:
                    raise
        with catalog.reading() as rows, database.transaction() as written:
            # Where files are in a bucket the copy of them has said.
            _copy_rows(rows, written, [table for table in _tables(rows) if not (moves and table == "blobs")])
            database.set_numbers(written, catalog.numbers())
        database.forget_removed()
        return len(blobs)


def _read_catalog(origin: Place, path: Path) -> EmbeddedDatabase:
    """Copy the catalog as it is now into a file."""
    if origin.database:
        catalog = EmbeddedDatabase(path)
        with (
            closing(open_database(origin.database, path)) as database,
            database.reading() as rows,
            catalog.transaction() as written,
        ):
            _copy_rows(rows, written, _tables(written))
            catalog.set_numbers(written, database.numbers())
        return catalog
    found = Path(origin.directory) / "catalog.db"
    if not found.is_file():
        raise DataDirectoryError(f"--from: {origin.directory} has no catalog.db: it is not a store's directory")
    with (
        closing(sqlite3.connect(f"file:{found}?mode=ro", uri=True)) as running,
        closing(sqlite3.connect(path)) as copied,
    ):
        running.backup(copied)
    return EmbeddedDatabase(path)


def _tables(rows: Rows) -> list[str]:
    return [name for (name,) in rows.execute(_TABLES)]


def _copy_rows(origin: Rows, destination: Rows, tables: Sequence[str]) -> None:
    for table in tables:
        if rows := origin.execute(f"SELECT * FROM {table}").fetchall():
            columns = tuple(rows[0].keys())
            statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks(columns)})"
            destination.executemany(statement, map(tuple, rows))


def _copy_files(
    open_file: Callable[[Blob], BlobReader], blobs: Sequence[Blob], data: DataDirectory, database: Database
) -> None:
    for blob in blobs:
        if data.has(blob.digest):
            continue
        upload = data.new_upload()
        try:
            with closing(open_file(blob)) as reader:
                upload.append("file", b"")
                while reader.remaining:
                    upload.append("file", reader.read())
            if upload.finish()["file"] != blob:
                raise CorruptBlob(f"{blob.digest} does not have the bytes of its digest")
            with data.staged(upload, {"file": blob}) as keep, database.transaction() as rows:
                keep(rows, "file")
        finally:
            upload.discard()


@contextmanager
def _opener(origin: Place, catalog: Database, work: Path) -> Iterator[Callable[[Blob], BlobReader]]:
    """Yield what opens a file of a place, whose store may run; it raises CorruptBlob where the file is gone."""
    if not origin.bucket:
        yield partial(_open_file, Path(origin.directory))
        return
    with closing(BucketDirectory(work, open_bucket(origin.bucket, _BLOB_S))) as data, catalog.reading() as rows:
        yield lambda blob: data.open(rows, {"file": blob})["file"]


def _open_file(root: Path, blob: Blob) -> BlobReader:
    try:
        file = open(root / "blobs" / blob.digest.partition(":")[2], "rb")  # noqa: SIM115  # the reader closes it
    except OSError as error:
        raise CorruptBlob(f"{blob.digest} cannot be read: {error.strerror}") from error
    return BlobReader(file, blob)


@contextmanager
def _empty(destination: Place, work: Path, moves: bool) -> Iterator[tuple[DataDirectory, Database]]:
    """Open an empty destination: its catalog is empty, and its files too if files will be copied."""
    root = Path(destination.directory or work)
    if destination.directory and moves and root.exists() and any(root.iterdir()):
        raise DataDirectoryError(f"--to: {root} is not empty")
    with ExitStack() as opened:
        data = (
            BucketDirectory(root, open_bucket(bucket, _BLOB_S))
            if (bucket := destination.bucket)
            else DataDirectory(root)
        )
        opened.enter_context(closing(data))
        if moves and data.count_blobs():
            raise DataDirectoryError(f"--to: {destination.files} is not empty")
        database = opened.enter_context(closing(open_database(destination.database, data.catalog_path)))
        if isinstance(data, BucketDirectory):
            data.database = database
        with database.reading() as rows:
            if rows.execute("SELECT count(*) FROM base_models").fetchone()[0]:
                raise DataDirectoryError(f"--to: {destination.database or data.catalog_path} is not empty")
        yield data, database
    if moves:
        shutil.rmtree(root / "uploads", ignore_errors=True)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="loraplex backup", description="Copy all that a store keeps.")
    kinds = "directory, bucket and postgresql:// URL, those that it has"
    for flag, name, text in (("--from", "origin", "a store's"), ("--to", "destination", "the copy's, empty:")):
        parser.add_argument(flag, dest=name, metavar="PLACE", nargs="+", required=True, help=f"{text} {kinds}")
    arguments = parser.parse_args(argv)
    try:
        files = copy(place("--from", arguments.origin), place("--to", arguments.destination))
    except (DataDirectoryError, CorruptBlob, Unavailable, OSError, sqlite3.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"copied the catalog and {files} files to {' '.join(arguments.destination)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
