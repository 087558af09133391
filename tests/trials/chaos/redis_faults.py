"""The kinds of faults of Redis: it restarts, is wiped, fails over, is slow or full, loses keys, or has another time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tests.trials.chaos.arena import Arena, Strike
from tests.trials.chaos.crowd_faults import waiting_crowd
from tests.trials.chaos.plan import PlannedFault

# Timeout in seconds for routers to say SERVING while Redis is slow: another fault may have killed one of them.
SERVING_S = 30.0

Striker = Callable[[Arena, PlannedFault], AbstractAsyncContextManager[Strike]]


def _server(what: str) -> Striker:
    @asynccontextmanager
    async def strike(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
        valkeys = arena.cluster.valkeys
        struck = Strike(await arena.take(["redis"], planned), arena.driver.now, arena.driver.streaming)
        struck.proof = await getattr(valkeys, what)()
        yield struck

    return strike


@asynccontextmanager
async def full(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Let Redis refuse whatever needs memory; running streams, claims and ends go on."""
    struck = Strike(await arena.take(["redis"], planned), arena.driver.now, arena.driver.streaming)
    async with arena.cluster.valkeys.full() as struck.proof:
        yield struck
        await asyncio.sleep(2.0 + 2.0 * planned.hold)


@asynccontextmanager
async def keys_lost(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Delete any half of the keys a few times, as an eviction or an operator's mistake does, while jobs wait."""
    struck = Strike(await arena.take(["redis"], planned), arena.driver.now, arena.driver.streaming)
    async with waiting_crowd(arena, planned) as struck.calls:
        lost = 0
        for number in range(3):
            lost += await arena.cluster.valkeys.lose_keys(f"{planned.pick} {number}")
            await asyncio.sleep(0.2 + 0.5 * planned.hold)
        struck.proof = f"{lost} keys were deleted" if lost else ""
        yield struck


@asynccontextmanager
async def clock_ahead(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Set Redis's clock ten minutes ahead while jobs wait, and put it right; then all goes on as before."""
    struck = Strike(await arena.take(["redis"], planned), arena.driver.now, arena.driver.streaming)
    async with waiting_crowd(arena, planned) as struck.calls:
        async with arena.cluster.valkeys.clock_ahead() as struck.proof:
            await asyncio.sleep(1.0 + 2.0 * planned.hold)
        yield struck


@asynccontextmanager
async def slow(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Break all connections to Redis, and delay the round trips of new ones; meanwhile routers serve."""
    struck = Strike(await arena.take(["redis"], planned), arena.driver.now, arena.driver.streaming)
    links = [pair.redis for pair in arena.cluster.links.values()]
    disturbed = sum(link.disturbed for link in links)
    for link in links:
        link.cut()
        link.heal()
        link.delay(0.5)
    try:
        yield struck
        for _ in range(8):
            await arena.driver.allow_more(1)
            await asyncio.sleep(0.5 + 0.1 * planned.hold)
        await arena.cluster.wait_serving(SERVING_S)
    finally:
        for link in links:
            link.delay(0.0)
    struck.proof = f"{sum(link.disturbed for link in links) - disturbed} pieces came late"


restart, wipe, failover = _server("restart"), _server("wipe"), _server("failover")
