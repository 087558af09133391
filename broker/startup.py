"""Connects a starting process to a Redis that may start later."""

from __future__ import annotations

import asyncio
import logging

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError

from broker.connection import REDIS_DOWN, RedisUnreachableError, connect, shown_url
from broker.eviction import check_eviction

log = logging.getLogger(__name__)

# Interval in seconds between attempts to connect.
RETRY_S = 0.5


async def connect_once_up(url: str) -> Redis:
    """Wait for the server and log that once. Raises RedisUnreachableError for errors that waiting cannot fix."""
    logged = False
    while True:
        try:
            return await _connect_and_check(url)
        except RedisUnreachableError as error:
            cause = error.__cause__
            # A bad URL has a ValueError as its cause; a version that is too old, or a server that evicts, has no cause.
            if not isinstance(cause, REDIS_DOWN) or _is_refused(cause):
                raise
            if not logged:
                log.warning("waits for Redis: %s", error)
                logged = True
        await asyncio.sleep(RETRY_S)


def _is_refused(error: BaseException | None) -> bool:
    """Tell whether the server refuses the user; the library makes that the cause of an error of the connection."""
    while error is not None and not isinstance(error, AuthenticationError):
        error = error.__cause__
    return error is not None


async def _connect_and_check(url: str) -> Redis:
    redis = await connect(url)
    try:
        await check_eviction(redis, shown_url(url))
    except REDIS_DOWN as error:
        await redis.aclose()
        raise RedisUnreachableError(f"--redis-url {shown_url(url)}: no answer ({error})") from error
    except BaseException:
        await redis.aclose()
        raise
    return redis
