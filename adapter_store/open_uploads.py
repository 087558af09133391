"""Bounds the uploads that a store receives at once, in shares of the tenants, and ends those that do not move.

An upload holds a file and some memory until its client has sent the last byte, so that clients which send one byte
each and wait would take all of either.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from google.protobuf.message import Message

from rpc.errors import DeadlinePassed, Exhausted
from rpc.shares import Shares

M = TypeVar("M", bound=Message)

# Maximum number of uploads at once; a tenant alone gets half of them.
UPLOADS = 64
# Time in seconds for which a client may send nothing, and minimum bytes a second over a longer time.
SILENT_S = 30.0
SLOWEST_BYTES_S = 64 * 1024
# Time in seconds after which a refused client is to call again.
_RETRY_S = 1.0


class OpenUploads:
    """The uploads of one store."""

    def __init__(self, uploads: int = UPLOADS, silent_s: float = SILENT_S) -> None:
        self._shares = Shares(uploads)
        self._silent_s = silent_s

    @asynccontextmanager
    async def one(self, parts: AsyncIterator[M], tenant: str) -> AsyncIterator[AsyncIterator[M]]:
        """Count an upload until the end; yields its messages, which end with DeadlinePassed if its client is too slow.

        Raises Exhausted.
        """
        if not self._shares.take(tenant):
            message = f"{tenant} has its share of the {self._shares.limit} uploads that this store receives at once"
            raise Exhausted(f"tenants/{tenant}/uploads", message, retry_after_s=_RETRY_S, reason="UPLOADS_FULL")
        try:
            yield _Paced(parts, self._silent_s)
        finally:
            self._shares.give(tenant)


class _Paced(Generic[M]):
    """The messages of an upload. Waiting uses up a time, which bytes give back."""

    def __init__(self, parts: AsyncIterator[M], silent_s: float) -> None:
        self._parts = parts
        self._silent_s = self._left_s = silent_s

    def __aiter__(self) -> AsyncIterator[M]:
        return self

    async def __anext__(self) -> M:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._left_s):
                part = await anext(self._parts)
        except TimeoutError:
            message = f"the upload has stopped, or brings less than {SLOWEST_BYTES_S} bytes a second; send it again"
            raise DeadlinePassed(message, reason="UPLOAD_TOO_SLOW") from None
        gained_s = part.ByteSize() / SLOWEST_BYTES_S
        self._left_s = min(self._silent_s, self._left_s - (loop.time() - began) + gained_s)
        return part
