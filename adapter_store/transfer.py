"""Files on the wire: received chunks go into an upload that is always cleaned up, sent chunks are verified."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

from adapter_store.storage import PIECE_BYTES, BlobReader, CorruptBlob, DataDirectory, Upload
from rpc.errors import DataLoss, InvalidField

N = TypeVar("N")
R = TypeVar("R")
# Returns the maximum size in bytes of a file by its name. Raises InvalidField on a name that is refused.
LimitOf = Callable[[str], int]


class Incoming:
    """The files of a call that are being received."""

    def __init__(self, upload: Upload, limit_of: LimitOf, total_bytes: int) -> None:
        self.upload = upload
        self._limit_of = limit_of
        self._total_bytes = total_bytes

    async def add(self, name: str, data: bytes) -> None:
        """Take the next chunk. Raises InvalidField as soon as a limit is passed."""
        sizes = self.upload.sizes
        limit = self._limit_of(name)
        if len(data) > PIECE_BYTES:
            raise InvalidField("chunk.data", f"has {len(data)} bytes; a chunk has at most {PIECE_BYTES}")
        if name in sizes and name != self.upload.current:
            raise InvalidField("chunk.name", f"{name} goes on after another file; send one file after the other")
        if sizes.get(name, 0) + len(data) > limit:
            raise InvalidField(name, f"is larger than the {limit} bytes accepted")
        if sum(sizes.values()) + len(data) > self._total_bytes:
            raise InvalidField("chunk", f"all files together are larger than the {self._total_bytes} bytes accepted")
        await asyncio.to_thread(self.upload.append, name, data)


@asynccontextmanager
async def incoming(data: DataDirectory, limit_of: LimitOf, total_bytes: int) -> AsyncIterator[Incoming]:
    """Open an upload; files that are not kept by the end are deleted, also when the call breaks off."""
    upload = data.new_upload()
    try:
        yield Incoming(upload, limit_of, total_bytes)
    finally:
        # A client that vanished first ends its stream, then cancels: the cancel may come while this waits for a thread.
        await asyncio.shield(asyncio.to_thread(upload.discard))


@asynccontextmanager
async def outgoing(
    open_files: Callable[[N], tuple[R, Mapping[str, BlobReader]]], name: N, kind: str, piece_bytes: int = PIECE_BYTES
) -> AsyncIterator[tuple[R, AsyncIterator[tuple[str, bytes]]]]:
    """Open files with `open_files(name)`; yields the record, and (file, piece) of each file in turn. Closes the files.

    Raises DataLoss of the `kind` `name` when the files are damaged, before a damaged file's last piece.
    """
    readers: Mapping[str, BlobReader] = {}
    try:
        record, readers = await asyncio.to_thread(open_files, name)
        yield record, _pieces(readers, piece_bytes)
    except CorruptBlob as error:
        raise DataLoss(kind, str(name), str(error)) from error
    finally:
        for reader in readers.values():
            await asyncio.shield(asyncio.to_thread(reader.close))


async def _pieces(readers: Mapping[str, BlobReader], piece_bytes: int) -> AsyncIterator[tuple[str, bytes]]:
    for file, reader in readers.items():
        yield file, await asyncio.to_thread(reader.read, piece_bytes)  # one empty piece for an empty file
        while reader.remaining:
            yield file, await asyncio.to_thread(reader.read, piece_bytes)
