"""The start of a process whose Redis may come up later than itself."""

from __future__ import annotations

import asyncio
import logging

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError

from broker.connection import REDIS_DOWN, RedisUnreachableError, connect

log = logging.getLogger(__name__)

RETRY_S = 0.5


async def connect_once_up(url: str) -> Redis:
    """Wait for the server, and say so in the log. Raises RedisUnreachableError for what no waiting mends."""
    told = False
    while True:
        try:
            return await connect(url)
        except RedisUnreachableError as error:
            cause = error.__cause__
            # A URL that can't be read has a ValueError as its cause, a version that is too old has none.
            if not isinstance(cause, REDIS_DOWN) or isinstance(cause, AuthenticationError):
                raise
            if not told:
                log.warning("waits for Redis: %s", error)
                told = True
        await asyncio.sleep(RETRY_S)
