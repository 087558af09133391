"""Redis's clock, in the tests' hands."""

from __future__ import annotations

from dataclasses import dataclass

from redis.asyncio import Redis

from broker.functions import Library, shipped_functions

CLOCK = "test:now"
START_MS = 1_700_000_000_000


def library_on_test_clock(**constants: int) -> Library:
    """Return a library whose clock is a key that the test sets.

    Free rows and charges are believed however slow the test is.
    """
    believed = {"FREE_ROWS_MS": 1 << 40, "CHARGE_RECORD_MS": 1 << 40, "REFUND_RECORD_MS": 1 << 40}
    text, clock = shipped_functions(**{**believed, **constants}), "redis.call('TIME')"
    assert clock in text
    return Library(text.replace(clock, f"{{0, 1000 * redis.call('GET', '{CLOCK}')}}"))


LIBRARY_ON_TEST_CLOCK = library_on_test_clock()


@dataclass
class Clock:
    """The time of LIBRARY_ON_TEST_CLOCK."""

    redis: Redis
    now_ms: int = START_MS

    async def advance(self, ms: int) -> None:
        """Let time pass."""
        self.now_ms += ms
        await self.redis.set(CLOCK, self.now_ms)
