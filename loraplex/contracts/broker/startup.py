"""Connects a starting process to a Redis that may start later, and checks that it evicts no keys: then, and while a
router runs.

An evicted key is a job that has to be found missing and dispatched again, or a live worker that is taken for dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ResponseError

from loraplex.contracts.broker.connection import (
    REDIS_DOWN,
    REDIS_URL_FLAG,
    RedisUnreachableError,
    check_server,
    client_of,
    shown_url,
)
from loraplex.runtime.telemetry.logging import LogOnce

log = logging.getLogger(__name__)

# Interval in seconds between attempts to connect.
RETRY_S = 0.5
_SAFE = "noeviction"
# Interval in seconds between looks at a server's policy.
POLICY_LOOK_S = 5.0


async def connect_once_up(url: str) -> Redis:
    """Wait for the server and log that once. Raises RedisUnreachableError for errors that waiting cannot fix."""
    once = LogOnce(log)
    while True:
        client = client_of(url)
        try:
            await _check(client, url, REDIS_URL_FLAG)
            return client
        except BaseException as error:
            await client.aclose()
            if not isinstance(error, RedisUnreachableError) or not _may_pass(error):
                raise
            once(f"waits for Redis: {error}")
        await asyncio.sleep(RETRY_S)


async def open_client(url: str, flag: str) -> Redis:
    """Return a client; that its server is away is logged. Raises RedisUnreachableError as connect_once_up does."""
    client = client_of(url, flag)
    try:
        await _check(client, url, flag)
    except RedisUnreachableError as error:
        if not _may_pass(error):
            await client.aclose()
            raise
        log.warning("%s", error)
    return client


def _may_pass(error: RedisUnreachableError) -> bool:
    """Tell whether waiting may fix an error."""
    # A bad URL has a ValueError as its cause; a version that is too old, or a server that evicts, has no cause. A user
    # whom the server refuses is, for the library, the cause of an error of the connection.
    may_pass, cause = isinstance(error.__cause__, REDIS_DOWN), error.__cause__
    while cause is not None:
        may_pass, cause = may_pass and not isinstance(cause, AuthenticationError), cause.__cause__
    return may_pass


async def _check(redis: Redis, url: str, flag: str) -> None:
    """Raise RedisUnreachableError as `check_server` does, and where evictions could be turned off; else only log them.

    A managed server may forbid CONFIG; what it does is in its INFO.
    """
    await check_server(redis, url, flag)
    server = f"{flag} {shown_url(url)}"
    try:
        policy, maxmemory, _ = await _eviction(redis)
        may_be_changed = policy != _SAFE and await _is_configurable(redis)
    except REDIS_DOWN as error:
        raise RedisUnreachableError(f"{server}: no answer ({error})") from error
    if policy == _SAFE:
        return
    advice = f"set it to {_SAFE} (CONFIG SET maxmemory-policy {_SAFE}), or waiting jobs may be lost"
    message = f"{server}: maxmemory-policy is {policy}; {advice}"
    if maxmemory and may_be_changed:
        raise RedisUnreachableError(message)
    log.warning("%s", message)


async def _eviction(redis: Redis) -> tuple[str, int, int]:
    """Return the policy, the limit of the memory, 0 for none, and the number of keys evicted so far."""
    memory, stats = await redis.info("memory"), await redis.info("stats")
    policy = str(memory.get("maxmemory_policy", _SAFE))
    return policy, int(memory.get("maxmemory", 0)), int(stats.get("evicted_keys", 0))


async def _is_configurable(redis: Redis) -> bool:
    try:
        await redis.config_get("maxmemory-policy")
    except ResponseError:  # no permission, or no such command
        return False
    return True


class EvictionWatch:
    """Looks at a server's policy and its evictions; `evicted` is called with the number of new ones."""

    def __init__(self, redis: Redis, evicted: Callable[[int], None]) -> None:
        self._redis = redis
        self._evicted = evicted
        # Of the last look; None before the first.
        self._policy: str | None = None
        self._count: int | None = None

    async def look(self) -> None:
        """Log a policy that has become unsafe, and keys that were evicted since the last look."""
        policy, _, count = await _eviction(self._redis)
        if self._policy is not None and policy not in {_SAFE, self._policy}:
            log.error("Redis's maxmemory-policy is %s now: it may evict waiting jobs; set it to %s", policy, _SAFE)
        if self._count is not None and count > self._count:
            lost = count - self._count
            self._evicted(lost)
            log.error("Redis has evicted %d keys: waiting jobs among them are dispatched again", lost)
        self._policy, self._count = policy, count
