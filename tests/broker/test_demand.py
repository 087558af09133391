"""The number of an adapter's homes follows its demand, with hysteresis; an adapter without demand has none."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.messages import Capacity
from loraplex.contracts.broker.terms import DEMAND_MS, HOLD_MS, Placement
from tests.broker.clocked_queue import KEYS, ClockedQueue, library_on_test_clock, make_job

ROOMY = Capacity(rows=64, rows_limit=64, tokens=100_000, max_tokens=4096, max_rank=64)


async def come(queue: ClockedQueue, adapter: str, count: int) -> None:
    """Let so many jobs of an adapter come; a worker takes them."""
    for number in range(count):
        await queue.enqueue(make_job(f"{adapter}{number} at {queue.now_ms}", "a", adapter=adapter))
    await queue.claim("w", ROOMY)


async def test_an_adapter_has_homes_for_its_part_of_the_busy_workers(queue: ClockedQueue) -> None:
    await come(queue, "hot", 16)
    for number in range(4):
        await come(queue, f"cold{number}", 1)
    assert await queue.homes(busy=2.0) == {"hot": 7}, "0.8 of 2 workers' rows, a quarter of each home's"
    assert await queue.homes(busy=None) == {"hot": 7}, "a router without a census changes nothing"
    await queue.advance(3 * DEMAND_MS)
    assert await queue.homes(busy=2.0) == {"hot": 7}, "all demand decays alike"
    await come(queue, "new", 4)
    assert await queue.homes(busy=2.0) == {"new": 7, "hot": 2}, "16 jobs are 0.8 now, beside 4"


async def test_homes_come_and_go_with_hysteresis(queue: ClockedQueue) -> None:
    await come(queue, "hot", 1)
    counts = [(await queue.homes(busy)).get("hot", 1) for busy in (0.245, 0.26, 0.18, 0.17, 0.245)]
    assert counts == [1, 2, 2, 1, 1]
    counts = [(await queue.homes(busy)).get("hot", 1) for busy in (0.65, 0.5, 0.355, 0.345, 0.355, 0.505)]
    assert counts == [3, 3, 3, 2, 2, 3]


async def test_a_job_of_a_cold_adapter_is_held_for_nobody(queue: ClockedQueue) -> None:
    await queue.claim("home", ROOMY)

    async def is_held(job_id: str) -> bool:
        await queue.enqueue(make_job(job_id, "a", adapter="x"), Placement(prefer=("home",)))
        held = not (await queue.claim("other", ROOMY)).jobs
        await queue.claim("home", ROOMY)
        return held

    assert [await is_held(job_id) for job_id in ("first", "second")] == [False, True]
    await queue.advance(4 * DEMAND_MS)
    assert not await is_held("third"), "two jobs of 20 tokens have decayed to less than one"


async def test_a_cold_job_still_wakes_the_worker_that_its_adapter_will_prefer(queue: ClockedQueue) -> None:
    await queue.claim("home", ROOMY)
    await queue.enqueue(make_job("j", "a", adapter="x"), Placement(prefer=("home",)))
    assert "wake:home" in await queue.names()


async def test_the_demand_of_so_many_adapters_is_kept(redis: Redis) -> None:
    queue = ClockedQueue(redis, library=library_on_test_clock(DEMAND_LIMIT=2))
    await queue.start()
    for adapter, count in (("a", 2), ("b", 1), ("c", 3)):
        await come(queue, adapter, count)
    await queue.homes(busy=1.0)
    assert await queue.members("demand") == ["a", "c", "*"]
    await queue.advance(6 * DEMAND_MS)
    await queue.homes(busy=1.0)
    assert "demand" not in await queue.names()


@pytest.mark.parametrize("back_ms", [HOLD_MS, 20 * DEMAND_MS, 100 * DEMAND_MS])
async def test_homes_are_right_after_the_clock_went_back(queue: ClockedQueue, back_ms: int) -> None:
    await come(queue, "hot", 8)
    await queue.advance(-back_ms)
    await queue.homes(busy=2.0)
    await come(queue, "hot", 8)
    assert await queue.homes(busy=1.95) == {"hot": 8}


async def test_lost_or_unreadable_values_count_as_no_demand(queue: ClockedQueue, redis: Redis) -> None:
    await come(queue, "hot", 8)
    await redis.hset(KEYS.prefix + "homes", mapping={"x": "no number", "y": "-3", "z": "1e300"})
    await redis.zadd(KEYS.prefix + "demand", {"far": float("inf"), "old": float("-inf")})
    assert await queue.homes(busy=1.95) == {"hot": 8}
    await redis.delete(KEYS.prefix + "demand")
    assert await queue.homes(busy=2.0) == {}
