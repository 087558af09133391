"""Keys of another type than broker/keys.py names, of those that all cells share; a census has the cells' own."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from broker.terms import ASIDE_MS

log = logging.getLogger(__name__)

T = TypeVar("T")


async def retried(redis: Redis, key: str, wanted: str, call: Callable[[], Awaitable[T]]) -> T:
    """Make a call that uses a key; where the key is not of the `wanted` type, rename it and make the call again."""
    try:
        return await call()
    except ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
    kind = await redis.type(key)
    assert isinstance(kind, bytes), "connect() makes clients of bytes"
    if (found := kind.decode()) not in {wanted, "none"}:  # else another router was first
        aside = f"{key}:aside"
        await redis.rename(key, aside)
        await redis.pexpire(aside, ASIDE_MS)
        log.error("the Redis key %s was a %s; it is %s now, for a day", key, found, aside)
    return await call()
