"""A clock that the tests of the queue's policy set."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.broker.scripts_clock import Clock


@pytest.fixture
async def clock(redis: Redis) -> Clock:
    """A clock that stands still until it is advanced."""
    clock = Clock(redis)
    await clock.advance(0)
    return clock
