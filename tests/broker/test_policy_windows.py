"""Jobs beyond a claim's windows are found by later scans, each of bounded cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker import terms
from loraplex.contracts.broker.messages import Capacity
from loraplex.contracts.broker.terms import Placement
from tests.broker.clocked_queue import ClockedQueue, make_job

ONE = Capacity(rows=1, rows_limit=8, tokens=10_000, max_tokens=4096, max_rank=64)


async def claim(queue: ClockedQueue, capacity: Capacity = ONE, worker: str = "w") -> list[str]:
    return [job.job_id for job in (await queue.claim(worker, capacity)).jobs]


async def beaten(queue: ClockedQueue, ms: int) -> None:
    """Let time pass in which one router beats."""
    for _ in range(0, ms, 500):
        await queue.advance(500)
        await queue.beat_router("here")


async def scans(redis: Redis) -> int:
    """Return the number of functions that the server has run."""
    stats = await redis.info("commandstats")
    return int(stats["cmdstat_fcall"]["calls"])


async def claimed_while_others_come(queue: ClockedQueue, wanted: str, most: int) -> int:
    """Count the claims of a worker that always finds fresh work until it gets that job."""
    for number in range(most):
        await queue.enqueue(make_job(f"fresh{number}", "busy"))
        if wanted in await claim(queue):
            return number + 1
    pytest.fail(f"{wanted} was passed over {most} times")


@pytest.mark.parametrize("unfit", [terms.REDISPATCHED_PER_SCAN, 150, 1_000])
async def test_redispatched_jobs_that_nobody_takes_are_in_front_of_no_others(queue: ClockedQueue, unfit: int) -> None:
    for number in range(unfit):
        await queue.enqueue(make_job(f"unfit{number}", "a", attempt=2, base="sha256:old"))
    await queue.enqueue(make_job("fits", "a", attempt=2))
    turns = -(-unfit // (terms.REDISPATCHED_PER_SCAN // 2))
    assert await claimed_while_others_come(queue, "fits", turns) >= 1


@pytest.mark.parametrize("unfit", [terms.PASSES_PER_TENANT, 50, 300])
async def test_a_tenant_s_jobs_that_nobody_takes_are_in_front_of_none_of_its_others(
    queue: ClockedQueue, unfit: int
) -> None:
    for number in range(unfit):
        await queue.enqueue(make_job(f"unfit{number}", "a", adapter="sha256:wide", rank=128))
    await queue.enqueue(make_job("fits", "a"))
    turns = -(-unfit // (terms.PASSES_PER_TENANT // 2))
    assert await claimed_while_others_come(queue, "fits", turns) >= 1


async def test_a_claim_that_finds_nothing_goes_on_where_the_last_one_ended(queue: ClockedQueue, redis: Redis) -> None:
    tenants = 2 * terms.SCANS_PER_CLAIM * terms.TENANTS_PER_SCAN
    for number in range(tenants + terms.NEWS_LIMIT):
        if number == tenants:
            await queue.enqueue(make_job("fits", "zoe"))
        await queue.enqueue(make_job(f"unfit{number}", f"t{number % tenants:04}", base="sha256:old"))
    got: list[list[str]] = []
    while not got or not got[-1]:
        before = await scans(redis)
        got.append(await claim(queue))
        assert await scans(redis) - before <= terms.SCANS_PER_CLAIM
        assert len(got) <= 3
    assert got[-1] == ["fits"]
    assert len(got) > 1


async def test_the_jobs_of_a_router_that_died_are_dropped_and_nobody_else_s(queue: ClockedQueue) -> None:
    for number in range(6):
        await queue.enqueue(make_job(f"dead{number}", "ab"[number % 2], router="dead", attempt=1 + number // 3))
    for number in range(2):
        await queue.enqueue(make_job(f"here{number}", "a", attempt=1 + number))
    # Others beat meanwhile, it does not.
    await beaten(queue, terms.ROUTER_TTL_MS)
    roomy = replace(ONE, rows=8)
    assert await claim(queue, roomy) == ["here1", "here0"]
    assert {"waiting", "again", "totals", "queue:a", "queue:b", "tenants"} & await queue.names() == set()


async def test_after_an_outage_every_router_gets_its_time_again(queue: ClockedQueue) -> None:
    for router in ("one", "two"):
        for number in range(2):
            await queue.enqueue(make_job(f"{router}{number}", "a", router=router))
    await queue.advance(10 * terms.ROUTER_TTL_MS)
    # Nobody has beaten: it was Redis that was away.
    assert await claim(queue) == ["one0"]
    await queue.beat_router("here")
    await beaten(queue, terms.ROUTER_TTL_MS - 500)
    assert await claim(queue, replace(ONE, rows=2)) == ["one1", "two0"]
    await beaten(queue, 500)
    assert await claim(queue) == []


async def test_after_the_clock_went_back_a_dead_router_is_dead_in_its_time(queue: ClockedQueue) -> None:
    for router in ("dead", "here"):
        await queue.enqueue(make_job(f"of {router}", "a", router=router))
    await queue.advance(-600_000)
    await beaten(queue, terms.ROUTER_TTL_MS + terms.ROUTERS_QUIET_MS)
    assert await claim(queue, replace(ONE, rows=2)) == ["of here"]


async def test_after_the_clock_went_back_no_job_waits_for_a_worker_that_is_gone(queue: ClockedQueue) -> None:
    await queue.want("sha256:x")
    await queue.enqueue(make_job("wide", "b", n=6))
    await queue.advance(terms.PATIENCE_MS)
    assert await claim(queue, replace(ONE, rows=2), "reserved") == []
    await claim(queue, worker="best")
    await queue.enqueue(make_job("held", "a", adapter="sha256:x"), Placement(prefer=("best",)))
    assert await claim(queue, replace(ONE, rows=8)) == []
    await queue.advance(-600_000)
    assert sorted(await claim(queue, replace(ONE, rows=8))) == ["held", "wide"]


async def test_the_claim_rate_is_measured_anew_after_the_clock_went_back(queue: ClockedQueue) -> None:
    for number in range(40):
        assert not await queue.enqueue(make_job(f"{number}", "a"))
    await claim(queue)
    await queue.advance(-600_000)
    for _ in range(5):  # one job a second
        await claim(queue)
        await queue.advance(1_000)
    assert await queue.enqueue(make_job("last", "a", priority=-1, deadline_ms=10_000)) == "late"


async def test_many_jobs_of_a_dead_router_are_dropped_by_and_by(queue: ClockedQueue, redis: Redis) -> None:
    count = 3 * terms.PASSES_PER_SCAN * terms.SCANS_PER_CLAIM
    for number in range(count):
        await queue.enqueue(make_job(f"dead{number}", "a", router="dead"))
    await queue.enqueue(make_job("here", "b"))
    await beaten(queue, terms.ROUTER_TTL_MS)
    left, dropped, got = count + 1, Counter[int](), list[str]()
    while left:
        before = await scans(redis)
        claimed = await queue.claim("w", ONE)
        got += [job.job_id for job in claimed.jobs]
        dropped[left - claimed.waiting - len(claimed.jobs)] += 1
        assert left - claimed.waiting <= (await scans(redis) - before) * terms.PASSES_PER_SCAN + terms.NEWS_LIMIT + 1
        left = claimed.waiting
    assert got == ["here"]
    assert sum(size * times for size, times in dropped.items()) == count
    assert {name for name in await queue.names() if name.startswith(("job:", "waiting", "queue:"))} == set()
