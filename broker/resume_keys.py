"""The keys of resume tokens in Redis, which routers without a key of their own share."""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis

from broker.keys import RESUME_KEYS
from broker.scripts import SCRIPTS
from broker.wrong_types import retried


class StoredResumeKeys:
    """The list of keys in Redis, the newest first. Keys are secrets: nothing here may be logged."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._merge = SCRIPTS.register(redis, "resume_keys")

    async def merge(self, made: str, used: Sequence[str]) -> list[str]:
        """Return the stored keys. If there are none, store the `used` ones of this router, or else the one it `made`.

        Where the stored keys have none of the used ones, Redis lost its data: the used ones are stored behind them.
        """
        stored = await retried(self._redis, RESUME_KEYS, "list", lambda: self._merge(RESUME_KEYS, [made, *used]))
        return [key.decode(errors="replace") for key in stored]
