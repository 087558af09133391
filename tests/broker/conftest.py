"""A clock that the tests of the queue's policy set."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from tests.broker.clocked_queue import Clock, ClockedQueue
from tests.broker.role_clients import role_clients


@pytest.fixture
async def clock(redis: Redis) -> Clock:
    """A clock that stands still until it is advanced."""
    clock = Clock(redis)
    await clock.advance(0)
    return clock


@pytest.fixture
async def queue(redis: Redis, valkey_url: str, clock: Clock) -> AsyncIterator[ClockedQueue]:
    """An empty queue on Redis, as routers and workers use it there, on that clock."""
    async with role_clients(redis, valkey_url) as roles:
        queue = ClockedQueue(redis, roles=roles)
        await queue.start()
        yield queue
