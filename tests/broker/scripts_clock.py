"""Redis's clock, in the tests' hands."""

from __future__ import annotations

from dataclasses import dataclass

from redis.asyncio import Redis

from broker.scripts import Scripts

CLOCK = "test:now"
START_MS = 1_700_000_000_000


def scripts_on_test_clock(**constants: int) -> Scripts:
    """Scripts whose clock is a key that the test sets; free rows and charges are believed however slow the test is."""
    clock = f"local now = tonumber(redis.call('GET', '{CLOCK}'))\n"
    believed = {"FREE_ROWS_MS": 1 << 40, "CHARGE_RECORD_MS": 1 << 40, "REFUND_RECORD_MS": 1 << 40}
    return Scripts({"clock": clock}, {**believed, **constants})


SCRIPTS_ON_TEST_CLOCK = scripts_on_test_clock()


@dataclass
class Clock:
    """The time of SCRIPTS_ON_TEST_CLOCK."""

    redis: Redis
    now_ms: int = START_MS

    async def advance(self, ms: int) -> None:
        """Let time pass."""
        self.now_ms += ms
        await self.redis.set(CLOCK, self.now_ms)
