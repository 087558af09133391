"""Redis's clock, in the tests' hands."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from redis.asyncio import Redis

from broker import terms
from broker.claims import CLAIM

CLOCK = "test:now"
START_MS = 1_700_000_000_000


@dataclass
class Clock:
    """What the scripts of a queue made after it take for the time."""

    redis: Redis
    now_ms: int = START_MS

    async def advance(self, ms: int) -> None:
        """Let time pass."""
        self.now_ms += ms
        await self.redis.set(CLOCK, self.now_ms)


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts read the test's clock; what a worker said of its room stands however slow the test is."""
    monkeypatch.setattr("broker.lua.NOW", f"\nlocal now = tonumber(redis.call('GET', '{CLOCK}'))\n")
    lasting = CLAIM.replace(f"'PX', {terms.ROOM_MS}", "'PX', 600000")
    assert lasting != CLAIM
    monkeypatch.setattr("broker.queue.CLAIM", lasting)


@pytest.fixture
async def clock(redis: Redis, still: None) -> Clock:
    """A clock that stands still until it is advanced."""
    clock = Clock(redis)
    await clock.advance(0)
    return clock
