"""`loraplex backup --from PLACE --to PLACE`: copies all that a store keeps, while it runs.

A place is a store's directory or a bucket's URL, as in `--data` and `--bucket`. The copy is a place that a store can
run on, so that the same command restores it, and moves a store from a directory into a bucket. What the copy has is of
one moment: the catalog is read first, and the files that it names after it; if one has gone meanwhile, it begins again.
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Protocol

from loraplex.adapter_store.bucket import BucketDirectory, open_bucket
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.records import Blob
from loraplex.adapter_store.replica import Replica
from loraplex.adapter_store.storage import BlobReader, CorruptBlob, DataDirectory, DataDirectoryError
from loraplex.runtime.rpc.errors import Unavailable

# Number of times that the copy begins again because a file has gone.
_TRIES = 5
# Timeouts in seconds of requests for the catalog and for a file.
_CATALOG_S, _BLOB_S = 60.0, 3600.0
_FILES = (
    "SELECT config_digest, config_bytes FROM revisions UNION SELECT weights_digest, weights_bytes FROM revisions "
    "UNION SELECT digest, bytes FROM base_files UNION SELECT config_digest, config_bytes FROM deleted_revisions "
    "UNION SELECT weights_digest, weights_bytes FROM deleted_revisions"
)


class BackupSource(Protocol):
    """A place that is copied."""

    def read_catalog(self, into: sqlite3.Connection) -> None:
        """Copy the catalog as it is now."""

    def open(self, blob: Blob) -> BlobReader:
        """Open a file. Raises CorruptBlob where it is gone."""


def copy(origin: str, destination: str) -> int:
    """Copy a place to an empty one; returns the number of files.

    Raises DataDirectoryError, CorruptBlob, Unavailable.
    """
    with ExitStack() as opened:
        work = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-backup-")))
        source = opened.enter_context(_opened(origin, work / "from"))
        catalog = opened.enter_context(closing(sqlite3.connect(work / "catalog.db")))
        data, database = opened.enter_context(_empty(destination, work / "to"))
        for attempt in range(_TRIES):
            source.read_catalog(catalog)
            blobs = [Blob(*row) for row in catalog.execute(_FILES)]
            try:
                _copy_files(source, blobs, data, database)
                break
            except CorruptBlob:
                if attempt == _TRIES - 1:
                    raise
        _write_catalog(catalog, database)
        return len(blobs)


def _copy_files(source: BackupSource, blobs: Sequence[Blob], data: DataDirectory, database: Database) -> None:
    for blob in blobs:
        if data.has(blob.digest):
            continue
        upload = data.new_upload()
        try:
            with closing(source.open(blob)) as reader:
                upload.append("file", b"")
                while reader.remaining:
                    upload.append("file", reader.read())
            if upload.finish()["file"] != blob:
                raise CorruptBlob(f"{blob.digest} does not have the bytes of its digest")
            with data.staged(upload, {"file": blob}) as keep, database.transaction() as rows:
                keep(rows, "file")
        finally:
            upload.discard()


def _write_catalog(catalog: sqlite3.Connection, database: Database) -> None:
    """Make the catalog that of the copy; what it says of places of files stays."""
    with database.reading() as rows:
        places = [tuple(row) for row in rows.execute("SELECT digest, place FROM blobs")]
    catalog.execute("DELETE FROM blobs")
    catalog.executemany("INSERT INTO blobs VALUES (?, ?)", places)
    catalog.commit()
    with database.reading() as rows:
        catalog.backup(rows)
    database.forget_removed()


class _Directory:
    """A store's directory, whose store may run."""

    def __init__(self, root: Path) -> None:
        if not (root / "catalog.db").is_file():
            raise DataDirectoryError(f"--from: {root} has no catalog.db: it is not a store's directory")
        self._root = root

    def read_catalog(self, into: sqlite3.Connection) -> None:
        """Copy the catalog as it is now."""
        with closing(sqlite3.connect(f"file:{self._root / 'catalog.db'}?mode=ro", uri=True)) as catalog:
            catalog.backup(into)

    def open(self, blob: Blob) -> BlobReader:
        """Open a file."""
        try:
            file = open(self._root / "blobs" / blob.digest.partition(":")[2], "rb")  # noqa: SIM115  # the reader closes it
        except OSError as error:
            raise CorruptBlob(f"{blob.digest} cannot be read: {error.strerror}") from error
        return BlobReader(file, blob)


class _Bucket:
    """A bucket, whose stores may run."""

    def __init__(self, data: BucketDirectory) -> None:
        self._data = data

    def read_catalog(self, into: sqlite3.Connection) -> None:
        """Copy the catalog as it is now."""
        self._data.database.refresh()
        with self._data.database.reading() as rows:
            rows.backup(into)

    def open(self, blob: Blob) -> BlobReader:
        """Open a file."""
        with self._data.database.reading() as rows:
            return self._data.open(rows, {"file": blob})["file"]


@contextmanager
def _opened(place: str, work: Path) -> Iterator[BackupSource]:
    if "://" not in place:
        yield _Directory(Path(place))
        return
    with _bucket(place, work) as data:
        yield _Bucket(data)


@contextmanager
def _empty(place: str, work: Path) -> Iterator[tuple[DataDirectory, Database]]:
    """Open a place to copy to, which has nothing yet."""
    if "://" not in place:
        root = Path(place)
        if root.exists() and any(root.iterdir()):
            raise DataDirectoryError(f"--to: {root} is not empty")
        with closing(DataDirectory(root)) as data, closing(Database(data.catalog_path)) as database:
            yield data, database
        shutil.rmtree(root / "uploads", ignore_errors=True)
        return
    with _bucket(place, work) as data:
        with data.database.reading() as rows:
            if rows.execute("SELECT EXISTS (SELECT 1 FROM base_models) OR EXISTS (SELECT 1 FROM blobs)").fetchone()[0]:
                raise DataDirectoryError(f"--to: {place} is not empty")
        yield data, data.database


@contextmanager
def _bucket(place: str, work: Path) -> Iterator[BucketDirectory]:
    with closing(BucketDirectory(work, open_bucket(place, _BLOB_S))) as data:
        data.database = Replica(data.catalog_path, open_bucket(place, _CATALOG_S))
        with closing(data.database):
            yield data


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="loraplex backup", description="Copy all that a store keeps.")
    parser.add_argument("--from", dest="origin", metavar="PLACE", required=True, help="a store's directory or bucket")
    parser.add_argument("--to", metavar="PLACE", required=True, help="an empty directory, or an empty bucket's folder")
    arguments = parser.parse_args(argv)
    try:
        files = copy(arguments.origin, arguments.to)
    except (DataDirectoryError, CorruptBlob, Unavailable, OSError, sqlite3.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"copied the catalog and {files} files to {arguments.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
