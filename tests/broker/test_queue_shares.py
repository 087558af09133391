"""Shares of a full queue: no tenant's can be taken by others, and the sum stays bounded."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.messages import Capacity, encode_record
from loraplex.contracts.broker.terms import DISPLACED_PER_ENQUEUE, Placement, QueueLimits, QueueState
from tests.broker.clocked_queue import KEYS, Clock, ClockedQueue, make_job
from tests.broker.test_wake_ups import commands

JOBS = 12
SIZE = len(encode_record(make_job("a/00", "a")))


async def full_queue(redis: Redis, limits: QueueLimits, tenants: str = "ab") -> ClockedQueue:
    """Two greedy tenants ask until they are refused."""
    queue = ClockedQueue(redis, limits)
    await queue.start()
    for number in range(2 * JOBS):
        for tenant in tenants:
            await queue.enqueue(make_job(f"{tenant}/{number:02}", tenant))
    assert await queue.count_waiting() == JOBS
    return queue


@pytest.mark.parametrize("limits", [QueueLimits(jobs=JOBS), QueueLimits(bytes=JOBS * SIZE)], ids=["jobs", "bytes"])
async def test_two_tenants_do_not_lock_out_a_third(redis: Redis, clock: Clock, limits: QueueLimits) -> None:
    queue = await full_queue(redis, limits)
    accepted = [not await queue.enqueue(make_job(f"c/{number:02}", "c")) for number in range(JOBS)]
    assert accepted == [True] * (JOBS // 3) + [False] * (JOBS - JOBS // 3)
    assert {tenant: len(await queue.newcomers(tenant)) for tenant in "abc"} == dict.fromkeys("abc", JOBS // 3)
    assert await queue.count_waiting() == JOBS


async def test_the_last_in_line_of_the_heaviest_tenant_loses_its_place(redis: Redis, clock: Clock) -> None:
    queue = await full_queue(redis, QueueLimits(jobs=JOBS), "b")
    await queue.enqueue(make_job("b/urgent", "b", priority=1))
    assert not await queue.enqueue(make_job("c", "c"))
    assert await queue.look_up(("b/11", 1), ("b/10", 1), ("c", 1)) == [
        QueueState.DISPLACED,
        QueueState.WAITS,
        QueueState.WAITS,
    ]
    await queue.finish("b/11", 1)
    assert await queue.look_up(("b/11", 1)) == [QueueState.ABSENT]


async def test_an_enqueue_that_comes_again_after_the_displacement_waits_again(redis: Redis, clock: Clock) -> None:
    queue = await full_queue(redis, QueueLimits(jobs=JOBS), "b")
    assert not await queue.enqueue(make_job("c", "c"))
    assert not await queue.enqueue(make_job("b/11", "b", attempt=2))
    assert await queue.look_up(("b/11", 2)) == [QueueState.WAITS]
    assert await redis.pttl("lp:{tiny/main}:job:b/11") == -1


async def test_claimed_jobs_are_no_use_of_the_queue(redis: Redis, clock: Clock) -> None:
    """The uses in Redis are corrected only when they are looked at."""
    queue = await full_queue(redis, QueueLimits(jobs=JOBS))
    capacity = Capacity(rows=JOBS // 2, rows_limit=JOBS, tokens=10_000, max_tokens=4096, max_rank=64)
    await queue.finish("a/00", 1)
    assert not await queue.enqueue(make_job("b/more", "b"))
    assert len((await queue.claim("w", capacity)).jobs) == JOBS // 2
    for number in range(JOBS):
        await queue.enqueue(make_job(f"c/{number:02}", "c"))
    assert [len(await queue.newcomers(tenant)) for tenant in "abc"] == [2, 4, 6]
    for number in range(JOBS):
        await queue.enqueue(make_job(f"a/more{number:02}", "a"))
    assert [len(await queue.newcomers(tenant)) for tenant in "abc"] == [4, 4, 4]


async def test_twice_the_weight_has_twice_the_share(redis: Redis, clock: Clock) -> None:
    queue = await full_queue(redis, QueueLimits(jobs=JOBS))
    for number in range(JOBS):
        await queue.enqueue(make_job(f"c/{number:02}", "c"), Placement(weight=2.0))
    assert {tenant: len(await queue.newcomers(tenant)) for tenant in "abc"} == {"a": 3, "b": 3, "c": 6}


@pytest.mark.parametrize("limits", [QueueLimits(jobs=JOBS), QueueLimits(bytes=JOBS * SIZE)], ids=["jobs", "bytes"])
async def test_jobs_that_have_begun_take_no_newcomers_place(redis: Redis, clock: Clock, limits: QueueLimits) -> None:
    """They wait before all newcomers and can't be displaced, so that no newcomer could have a place again."""
    queue = ClockedQueue(redis, limits)
    await queue.start()
    for number in range(2 * JOBS):
        assert not await queue.enqueue(make_job(f"begun/{number:02}", "a", attempt=2))
    for number in range(JOBS):
        assert not await queue.enqueue(make_job(f"{'ab'[number % 2]}/{number:02}", "ab"[number % 2]))
    assert await queue.enqueue(make_job("c/refused", "a"))
    assert not await queue.enqueue(make_job("c", "c"))


async def test_nobody_is_refused_while_another_uses_more() -> None:
    """Check it with any number of tenants, sizes and weights; the sum of all stays within the limits."""
    for seed in range(15):
        print(f"seed {seed}")
        chance = random.Random(seed)
        limits, count = QueueLimits(chance.randint(1, 30), chance.randint(1, 30) * SIZE), chance.randint(1, 40)
        queue = ClockedQueue(limits=limits)
        await queue.start()
        weights = {f"t{number}": chance.choice((0.5, 1.0, 3.0)) for number in range(count)}
        for number in range(150):
            tenant = chance.choice(list(weights)[: chance.randint(1, count)])
            begun = chance.random() < 0.1
            job = make_job(f"{number}", tenant, prompt=chance.choice((1, 4, 4, 100)), attempt=1 + begun)
            refused = await queue.enqueue(job, Placement(weights[tenant], begun=begun))
            newcomers = [one for one in (await queue.waiting()).values() if one.attempt == 1]
            assert len(newcomers) <= limits.jobs
            assert sum(one.size for one in newcomers) <= limits.bytes
            if refused:
                jobs, size = (
                    Counter({tenant: 1}),
                    Counter({tenant: len(encode_record(replace(job, weight=weights[tenant])))}),
                )
                for one in newcomers:
                    jobs[one.tenant] += 1
                    size[one.tenant] += one.size
                uses = {name: max(jobs[name] / limits.jobs, size[name] / limits.bytes) / weights[name] for name in jobs}
                assert max(uses.values()) == uses[tenant]
            if chance.random() < 0.2:
                await queue.claim("w", Capacity(2, 8, tokens=10_000, max_tokens=4096, max_rank=64))


async def test_one_large_job_displaces_a_bounded_number_of_small_ones() -> None:
    queue = ClockedQueue(limits=QueueLimits(bytes=10 * DISPLACED_PER_ENQUEUE * SIZE))
    await queue.start()
    for number in range(10 * DISPLACED_PER_ENQUEUE):
        assert not await queue.enqueue(make_job(f"a/{number:02}", "a")) or number > 500
    before = await queue.count_waiting()
    large = make_job("b", "b", prompt=3 * DISPLACED_PER_ENQUEUE * SIZE // 2)
    while await queue.enqueue(large):  # a client that calls again
        waiting = await queue.count_waiting()
        assert before - waiting == DISPLACED_PER_ENQUEUE
        before = waiting
    assert "b" in await queue.waiting()


async def test_lost_uses_are_known_again_after_a_census(redis: Redis, clock: Clock) -> None:
    queue = await full_queue(redis, QueueLimits(jobs=JOBS), "b")
    await redis.delete(KEYS.prefix + "uses")
    assert await queue.enqueue(make_job("c/0", "c")) == "jobs"
    await queue.beat_router("here")
    assert not await queue.enqueue(make_job("c/1", "c"))


async def test_the_enqueue_that_finds_the_queue_full_does_not_go_through_all_tenants(
    redis: Redis, clock: Clock
) -> None:
    queue = ClockedQueue(redis, QueueLimits(jobs=100))
    await queue.start()
    for number in range(100):
        assert not await queue.enqueue(make_job(f"t{number}", f"t{number}"))
    before = await commands(redis)
    assert await queue.enqueue(make_job("more", "more")) == "jobs"
    assert await commands(redis) - before < 40
