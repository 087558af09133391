"""A clock that the tests of the queue's policy set."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.broker.both_queues import BothQueues
from tests.broker.scripts_clock import Clock


@pytest.fixture
async def clock(redis: Redis) -> Clock:
    """A clock that stands still until it is advanced."""
    clock = Clock(redis)
    await clock.advance(0)
    return clock


@pytest.fixture
async def both(redis: Redis, clock: Clock) -> BothQueues:
    """An empty queue on Redis and its model, on that clock."""
    both = BothQueues(redis)
    await both.start()
    return both
