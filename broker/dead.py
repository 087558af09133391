"""Dead letters of a cell: records of the last jobs that were ended because they killed their workers' engines."""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from broker.codec import decode_dead_job, encode_dead_job
from broker.keys import Keys
from broker.messages import DeadJob
from broker.scripts import SCRIPTS

log = logging.getLogger(__name__)

# Maximum number and bytes of the dead letters of a cell.
DEAD_LIMIT = 1_000
DEAD_BYTES = 1 << 20


class DeadLetters:
    """A list of dead letters in Redis, bounded in count and bytes."""

    def __init__(self, redis: Redis, keys: Keys, *, limit: int = DEAD_LIMIT, bytes_limit: int = DEAD_BYTES) -> None:
        self._redis = redis
        self._key = keys.dead
        self._limits = (limit, bytes_limit)
        self._push = SCRIPTS.register(redis, "dead_push")

    async def push(self, dead: DeadJob) -> None:
        """Keep a dead letter; a repeated call keeps it once."""
        await self._push(self._key, [encode_dead_job(dead), *self._limits])

    async def list(self) -> list[DeadJob]:
        """Return all dead letters, the newest first."""
        found: list[DeadJob] = []
        for data in await self._redis.lrange(self._key, 0, -1):
            assert isinstance(data, bytes), "connect() makes clients of bytes"
            try:
                found.append(decode_dead_job(data))
            except DecodeError:  # another version wrote it
                log.warning("cannot read a dead letter of %d bytes", len(data))
        return found
