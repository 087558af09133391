"""Blobs in a bucket, which stores on one database share; a directory of the store's own has what is on its way.

    blobs/HEX/ID      a complete file; the catalog's table `blobs` says which one is a digest's

Every upload has an id of its own, so that a removed file is never one that another store has begun to use: a file is
removed after the row that named it. What a killed store has left is removed after a day.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from loraplex.adapter_store.database import Database
from loraplex.adapter_store.records import Blob, Rows
from loraplex.adapter_store.storage import (
    PIECE_BYTES,
    CorruptBlob,
    DataDirectory,
    DataDirectoryError,
    Keep,
    Readable,
    Upload,
)
from loraplex.contracts.artifacts.names import DIGEST_PREFIX
from loraplex.runtime.rpc.errors import Unavailable

log = logging.getLogger(__name__)

# Age of a file without a row from which on no upload can still be about to name it.
_LEFT_OVER = timedelta(days=1)
# Size in bytes of the parts of a large file, and how many are sent at once.
_PART_BYTES, _PARTS = 8 << 20, 4
# Timeout in seconds for a bucket's answer to a request or to one part, beyond which it counts as hung.
_SILENT_S = 20.0


def open_bucket(url: str, timeout_s: float) -> ObjectStore:
    """Open a bucket, with credentials and endpoint of the provider's usual variables. Raises DataDirectoryError.

    `timeout_s` is that of one request, with all of its bytes.
    """
    try:
        times = {
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=5),
            "read_timeout": timedelta(seconds=_SILENT_S),
        }
        options: Any = {"client_options": {**times, "allow_http": True}}  # where the operator's endpoint says so
        options["retry_config"] = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}
        return from_url(url, **({} if url.startswith("memory:") else options))
    except (BaseError, ValueError) as error:
        raise DataDirectoryError(f"--bucket: {url}: {str(error).partition(chr(10))[0]}") from error


class BucketNotes:
    """Small files in a folder of a bucket. Raises OSError."""

    def __init__(self, bucket: ObjectStore) -> None:
        self._bucket = bucket

    def put(self, name: str, data: bytes) -> None:
        """Keep a file."""
        with _os_errors():
            obstore.put(self._bucket, name, data)

    def names(self) -> list[str]:
        """Return the names of all files."""
        with _os_errors():
            return [each["path"] for page in obstore.list(self._bucket) for each in page]

    def get(self, name: str) -> bytes:
        """Return a file."""
        with _os_errors():
            return bytes(obstore.get(self._bucket, name).bytes())


@contextmanager
def _os_errors() -> Iterator[None]:
    try:
        yield
    except BaseError as error:
        raise OSError(str(error).partition("\n")[0]) from error


class BucketDirectory(DataDirectory):
    """A data directory whose blobs are in a bucket. `database` is set before the first of them is kept.

    `failed` is called for each request that the bucket did not carry out.
    """

    def __init__(self, root: Path, bucket: ObjectStore, failed: Callable[[], None] = lambda: None) -> None:
        super().__init__(root)
        self._bucket, self._failed = bucket, failed
        self._down_until = 0.0
        self.database: Database  # set by the store

    @contextmanager
    def staged(self, upload: Upload, files: Mapping[str, Blob]) -> Iterator[Keep]:
        """Copy files of an upload into the bucket before the transaction, unless it has them; the rest as there."""
        with self.database.reading() as rows:
            missing = [name for name, blob in files.items() if _place(rows, blob.digest) is None]
        places = {name: self._put(upload, name, files[name]) for name in missing}

        def keep(rows: Rows, file: str) -> None:
            if _place(rows, files[file].digest) is None:
                if file not in places:  # it was removed meanwhile
                    places[file] = self._put(upload, file, files[file])
                rows.execute("INSERT INTO blobs VALUES (?, ?)", (files[file].digest, places[file]))

        try:
            yield keep
        finally:
            with self.database.reading() as rows:
                unused = [place for name, place in places.items() if _place(rows, files[name].digest) != place]
            self._delete(unused)

    def _put(self, upload: Upload, name: str, blob: Blob) -> str:
        place = f"blobs/{blob.digest.removeprefix(DIGEST_PREFIX)}/{uuid.uuid4().hex}"
        with self._asking():
            obstore.put(self._bucket, place, upload.path / name, chunk_size=_PART_BYTES, max_concurrency=_PARTS)
        return place

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Ask the bucket. After a failure it is not asked for as long as that took: not all calls wait for a timeout.

        Raises Unavailable.
        """
        if (began := time.monotonic()) < self._down_until:
            raise Unavailable("the bucket of the store did not answer just now", reason="BUCKET_DOWN")
        try:
            yield
        except BaseError as error:
            self._failed()
            self._down_until = 2 * time.monotonic() - began
            message = f"the bucket of the store does not answer: {str(error).partition(chr(10))[0]}"
            raise Unavailable(message, reason="BUCKET_DOWN") from error

    def _open(self, rows: Rows, blob: Blob) -> Readable:
        place = _place(rows, blob.digest)
        if place is None:
            raise CorruptBlob(f"{blob.digest} is not in the bucket")
        return _Object(self._bucket, place, self._asking)

    def has(self, digest: str) -> bool:
        """Tell whether a blob is there."""
        with self.database.reading() as rows:
            return _place(rows, digest) is not None

    def remove(self, digests: Collection[str]) -> None:
        """Remove the rows of blobs that no row needs, and then their files."""
        if not digests:
            return
        try:
            with self.database.transaction() as rows:
                gone = self.database.unreferenced(digests)
                places = [place for digest in gone if (place := _place(rows, digest)) is not None]
                rows.executemany("DELETE FROM blobs WHERE digest = ?", [(digest,) for digest in gone])
            self._delete(places)
        except Unavailable as error:  # the next start removes them
            log.warning("%d files stay in the bucket: %s", len(digests), error)

    def clean(self, referenced: set[str]) -> int:
        """Delete what a crash left, in the directory at once and in the bucket after a day. Returns how many."""
        removed = super().clean(set())
        with self.database.reading() as rows:
            placed = {row["digest"]: row["place"] for row in rows.execute("SELECT * FROM blobs")}
        self.remove([digest for digest in placed if digest not in referenced])
        known, before = set(placed.values()), datetime.now(UTC) - _LEFT_OVER
        try:
            for page in obstore.list(self._bucket, "blobs/"):
                old = [each["path"] for each in page if each["path"] not in known and each["last_modified"] < before]
                removed += len(old)
                self._delete(old)
        except BaseError as error:
            log.warning("files that a killed store has left stay in the bucket: %s", error)
        return removed

    def count_blobs(self) -> int:
        """Return the number of blobs, of many only some."""
        try:
            return len(next(iter(obstore.list(self._bucket, "blobs/")), ()))
        except BaseError as error:
            raise DataDirectoryError(f"--bucket: it cannot be read: {str(error).partition(chr(10))[0]}") from error

    def _delete(self, places: Collection[str]) -> None:
        with suppress(BaseError):  # those that stay are removed after a day
            if places:
                obstore.delete(self._bucket, list(places))


class _Object:
    """The bytes of an object, which is asked for with the first read."""

    def __init__(self, bucket: ObjectStore, place: str, asking: Callable[[], AbstractContextManager[None]]) -> None:
        self._bucket, self._place, self._asking = bucket, place, asking
        self._pieces: Iterator[Any] | None = None
        self._left = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        """Return at most so many bytes more."""
        try:
            with self._asking():
                if self._pieces is None:
                    self._pieces = iter(obstore.get(self._bucket, self._place).stream(min_chunk_size=PIECE_BYTES))
                while not self._left and size:
                    self._left = memoryview(bytes(next(self._pieces)))
        except StopIteration:
            return b""
        except (Unavailable, FileNotFoundError) as error:
            raise OSError(0, str(error).partition("\n")[0]) from error
        piece, self._left = bytes(self._left[:size]), self._left[size:]
        return piece

    def close(self) -> None:
        """Forget the stream, which ends its request."""
        self._pieces, self._left = None, memoryview(b"")


def _place(rows: Rows, digest: str) -> str | None:
    row = rows.execute("SELECT place FROM blobs WHERE digest = ?", (digest,)).fetchone()
    return None if row is None else str(row["place"])
