"""Keys of another type than broker/keys.py names, of those that all cells share; a census has the cells' own."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from broker.scripts import SCRIPTS

log = logging.getLogger(__name__)

T = TypeVar("T")


async def retried(redis: Redis, key: str, wanted: str, call: Callable[[], Awaitable[T]]) -> T:
    """Make a call that uses a key; where the key is not of the `wanted` type, rename it and make the call again."""
    try:
        return await call()
    except ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
    await set_aside(redis, key, wanted)
    return await call()


async def set_aside(redis: Redis, key: str, wanted: str) -> None:
    """Rename a key that is not of the `wanted` type."""
    aside = f"{key}:aside"
    if found := await SCRIPTS.register(redis, "set_aside")(key, [wanted, aside]):
        log.error("the Redis key %s was a %s; it is %s now, for a day", key, found.decode(), aside)
