"""The adapters that every worker of a cell keeps on its device, also workers that start later."""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from broker.codec import decode_adapter_request, encode_adapter_request
from broker.keys import Keys
from broker.messages import AdapterRef, AdapterRequest

log = logging.getLogger(__name__)


def is_unpinned_by(pinned: AdapterRef, unpinned: AdapterRef) -> bool:
    """Return whether unpinning one revision unpins the other: the same bytes, or a revision of the same adapter."""
    return pinned.digest == unpinned.digest or _adapter(pinned) == _adapter(unpinned)


def _adapter(ref: AdapterRef) -> str:
    return ref.revision.rpartition("/")[0]


class PinnedAdapters:
    """Pinned adapters in Redis, a hash by digest."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._key = keys.pins

    async def pin(self, request: AdapterRequest) -> None:
        """Pin an adapter."""
        await self._redis.hset(self._key, request.adapter.digest, encode_adapter_request(request))

    async def unpin(self, ref: AdapterRef) -> None:
        """Unpin an adapter with all its revisions; does nothing if none is pinned."""
        pinned = [request.adapter for request in await self.list()]
        gone = [adapter.digest for adapter in pinned if is_unpinned_by(adapter, ref)]
        if gone:
            await self._redis.hdel(self._key, *gone)

    async def list(self) -> list[AdapterRequest]:
        """Return all pinned adapters."""
        found: list[AdapterRequest] = []
        for data in (await self._redis.hgetall(self._key)).values():
            assert isinstance(data, bytes), "connect() makes clients of bytes"
            try:
                found.append(decode_adapter_request(data))
            except DecodeError:  # another version wrote it
                log.warning("cannot read a pin of %d bytes", len(data))
        return found
