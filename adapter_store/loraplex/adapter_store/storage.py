"""The data directory: uploads as they come in, and blobs, files named by the digest of their content.

    DATA/lock           held while a store runs on the directory
    DATA/reserve        room on the disk for the deletion of adapters when there is no other
    DATA/catalog.db     see embedded.py
    DATA/uploads/ID/    files being received; whatever is here at start-up is left from a crash
    DATA/blobs/HEX      complete files; one without a row in the catalog is left from a crash too

A file is written in uploads/, synced, and renamed into blobs/; then the catalog's commit makes it visible. All of it
blocks: call it in a thread.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from loraplex.adapter_store.records import Blob, Rows
from loraplex.contracts.artifacts.names import DIGEST_PREFIX
from loraplex.runtime.interpreter import StartError
from loraplex.runtime.rpc.errors import Exhausted

PIECE_BYTES = 1024 * 1024
# Maximum size in bytes of the reserve, and its maximum share of the disk: a deletion writes some pages of 4 KiB to the
# catalog's log, and another of each row that it overwrites.
RESERVE_BYTES, _RESERVE_SHARE = 16 << 20, 1 / 16
# Reason of the error of a call for which the disk has no room.
DISK_FULL = "DISK_FULL"


class DataDirectoryError(StartError):
    """The data directory cannot be used; the message is one line."""


class CorruptBlob(Exception):
    """A blob's file is missing, or its bytes do not have its digest."""


class Upload:
    """A directory of growing files, made with the first of them. Its methods may run in several threads, as when a call
    is cancelled while a thread still writes for it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._discarded = False
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._hashes: dict[str, hashlib._Hash] = {}
        # The name of the file that grows, empty before the first; and the bytes received, by file.
        self.current = ""
        self.sizes: dict[str, int] = {}

    def append(self, name: str, data: bytes) -> None:
        """Write to the end of `name`, which is the current file or a new one. Raises Exhausted on a full disk."""
        with self._lock, _disk_errors():
            if self._discarded:
                raise RuntimeError("the upload is discarded")
            if name != self.current:
                self._finish_file()
                self.path.mkdir(exist_ok=True)
                self._file = open(self.path / name, "xb")  # noqa: SIM115  # closed by _finish_file()
                self.current, self._hashes[name], self.sizes[name] = name, hashlib.sha256(), 0
            assert self._file is not None
            self._file.write(data)
            self._hashes[name].update(data)
            self.sizes[name] += len(data)

    def finish(self) -> dict[str, Blob]:
        """Make the files durable; returns their digests and sizes. Raises Exhausted on a full disk."""
        with self._lock, _disk_errors():
            self._finish_file()
            sizes = self.sizes.items()
            return {name: Blob(DIGEST_PREFIX + self._hashes[name].hexdigest(), size) for name, size in sizes}

    def digest(self, name: str) -> str:
        """Return the digest of the bytes received so far."""
        with self._lock:
            return DIGEST_PREFIX + self._hashes[name].hexdigest()

    def rewrite(self, name: str, data: bytes) -> Blob:
        """Replace a file of a finished upload durably; returns its digest and size. Raises Exhausted on a full disk."""
        with self._lock, _disk_errors():
            if self._discarded:
                raise RuntimeError("the upload is discarded")
            with open(self.path / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._hashes[name], self.sizes[name] = hashlib.sha256(data), len(data)
            return Blob(DIGEST_PREFIX + self._hashes[name].hexdigest(), len(data))

    def discard(self) -> None:
        """Delete the files that were not kept."""
        with self._lock:
            self._discarded = True
            if self._file is not None:
                with suppress(OSError):  # a full disk cannot take what is still buffered
                    self._file.close()
                self._file = None
            shutil.rmtree(self.path, ignore_errors=True)

    def _finish_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


class Readable(Protocol):
    """A blob's bytes, from the beginning."""

    def read(self, size: int, /) -> bytes:
        """Return at most so many bytes more; empty at the end. Raises OSError."""

    def close(self) -> None:
        """Close it."""


# Keeps a file of a finished upload as its blob, in the transaction of a connection.
Keep = Callable[[Rows, str], None]


class BlobReader:
    """Reads a blob piece by piece; returns the last piece only if all pieces together have the digest."""

    def __init__(self, file: Readable, blob: Blob) -> None:
        self._file = file
        self._blob = blob
        self._sha256 = hashlib.sha256()
        self._lock = threading.Lock()
        self.remaining = blob.size

    def read(self, piece_bytes: int = PIECE_BYTES) -> bytes:
        """Return the next piece; empty at the end. Raises CorruptBlob."""
        with self._lock:
            try:
                piece = self._file.read(min(piece_bytes, self.remaining))
            except OSError as error:
                raise CorruptBlob(f"{self._blob.digest} cannot be read: {error.strerror}") from error
            self._sha256.update(piece)
            self.remaining -= len(piece)
            cut = not piece and self.remaining
            if cut or (not self.remaining and DIGEST_PREFIX + self._sha256.hexdigest() != self._blob.digest):
                raise CorruptBlob(f"{self._blob.digest} does not have the bytes of its digest")
            return piece

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


class DataDirectory:
    """The data directory, locked against other stores. Raises DataDirectoryError."""

    def __init__(self, root: Path) -> None:
        self._root, self._uploads, self._blobs = root, root / "uploads", root / "blobs"
        self._reserve = root / "reserve"
        try:
            for directory in (root, self._uploads, self._blobs):
                directory.mkdir(parents=True, exist_ok=True)
            self._lock = open(root / "lock", "ab")  # noqa: SIM115  # held until close()
        except OSError as error:
            raise DataDirectoryError(f"--data: {root} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise DataDirectoryError(f"--data: {root} is in use by another store") from error
        self.catalog_path = root / "catalog.db"

    def keep_reserve(self) -> None:
        """Take the reserve from the disk, if it is not there and there is room."""
        size = min(RESERVE_BYTES, int(shutil.disk_usage(self._root).total * _RESERVE_SHARE))
        try:
            with open(self._reserve, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except FileExistsError:
            pass
        except OSError:  # no room yet, or a file system that allocates nothing ahead
            self._reserve.unlink(missing_ok=True)

    def give_reserve(self) -> bool:
        """Give the reserve back to the disk; returns whether there was one."""
        try:
            self._reserve.unlink()
        except FileNotFoundError:
            return False
        return True

    def used_share(self) -> float:
        """Return the share of the disk that is in use, as an unprivileged process sees it."""
        usage = shutil.disk_usage(self._root)
        return usage.used / max(1, usage.used + usage.free)

    def close(self) -> None:
        """Unlock the directory."""
        self._lock.close()

    def clean(self, referenced: set[str]) -> int:
        """Delete what a crash left: uploads, and blobs whose digest is not `referenced`. Returns how many."""
        uploads = [*self._uploads.iterdir()]
        orphans = [path for path in self._blobs.iterdir() if DIGEST_PREFIX + path.name not in referenced]
        for path in uploads:
            shutil.rmtree(path)
        for path in orphans:
            path.unlink()
        return len(uploads) + len(orphans)

    def count_blobs(self) -> int:
        """Return the number of blobs."""
        return sum(1 for _ in self._blobs.iterdir())

    def new_upload(self) -> Upload:
        """Return an empty upload; it touches the disk with its first bytes."""
        return Upload(self._uploads / uuid.uuid4().hex)

    @contextmanager
    def staged(self, upload: Upload, files: Mapping[str, Blob]) -> Iterator[Keep]:
        """Prepare files of a finished upload to be kept; yields the function that keeps one, in a transaction.

        It moves the file to its blob, durably, and replaces an existing blob, which may be damaged.
        """

        def keep(_: Rows, file: str) -> None:
            with _disk_errors():
                os.replace(upload.path / file, self._path(files[file].digest))
                sync_directory(self._blobs)

        yield keep

    def open(self, rows: Rows, blobs: Mapping[str, Blob]) -> dict[str, BlobReader]:
        """Open blobs for reading, all or none, as a connection sees them. Raises CorruptBlob."""
        readers: dict[str, BlobReader] = {}
        with ExitStack() as opened:
            for name, blob in blobs.items():
                readers[name] = BlobReader(self._open(rows, blob), blob)
                opened.callback(readers[name].close)
            opened.pop_all()
        return readers

    def _open(self, _: Rows, blob: Blob) -> Readable:
        try:
            file = open(self._path(blob.digest), "rb")  # noqa: SIM115  # the reader closes it
        except OSError as error:
            raise CorruptBlob(f"{blob.digest} cannot be read: {error.strerror}") from error
        if os.fstat(file.fileno()).st_size != blob.size:
            file.close()
            raise CorruptBlob(f"{blob.digest} does not have {blob.size} bytes")
        return file

    def has(self, digest: str) -> bool:
        """Tell whether a blob is there."""
        return self._path(digest).exists()

    def remove(self, digests: Collection[str]) -> None:
        """Delete blobs that no row needs; open readers go on. The caller holds the catalog's lock."""
        for digest in digests:
            self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._blobs / digest.removeprefix(DIGEST_PREFIX)


def sync_directory(path: Path) -> None:
    """Write a directory's names to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Translate a full disk to Exhausted."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise disk_full() from error
        raise


def disk_full() -> Exhausted:
    """Return the error of a call for which the store's disk has no room."""
    message = "the adapter store's disk is full; delete adapters or enlarge it"
    return Exhausted("adapter store", message, retry_after_s=60.0, reason=DISK_FULL)
