"""The adapters that all workers of a cell keep on their devices: those that serve now, and those that start later."""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from broker.codec import decode_adapter_request, encode_adapter_request
from broker.keys import Keys
from broker.messages import AdapterRef, AdapterRequest

log = logging.getLogger(__name__)


def is_let_go(pinned: AdapterRef, unpinned: AdapterRef) -> bool:
    """Whether to unpin a revision is to unpin that one: the same bytes, or another revision of the same adapter."""
    return pinned.digest == unpinned.digest or _adapter(pinned) == _adapter(unpinned)


def _adapter(ref: AdapterRef) -> str:
    return ref.revision.rpartition("/")[0]


class PinnedAdapters:
    """A hash in Redis, by digest."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._key = keys.pins

    async def add(self, request: AdapterRequest) -> None:
        """Pin one."""
        await self._redis.hset(self._key, request.adapter.digest, encode_adapter_request(request))

    async def remove(self, ref: AdapterRef) -> None:
        """Unpin one, and other revisions of the same adapter; one that is not pinned is none."""
        gone = [one.adapter.digest for one in await self.list() if is_let_go(one.adapter, ref)]
        if gone:
            await self._redis.hdel(self._key, *gone)

    async def list(self) -> list[AdapterRequest]:
        """All of them."""
        found: list[AdapterRequest] = []
        for data in (await self._redis.hgetall(self._key)).values():
            assert isinstance(data, bytes), "connect() makes clients of bytes"
            try:
                found.append(decode_adapter_request(data))
            except DecodeError:  # another version's
                log.warning("a pin of %d bytes can't be read", len(data))
        return found
