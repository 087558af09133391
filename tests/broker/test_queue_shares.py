"""Shares of a full queue: no tenant's can be taken by others, and the sum stays bounded. On Valkey and in the model."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers
from redis.asyncio import Redis

from bench.queue_model.queue_model import QueueModel
from bench.queue_model.waiting_jobs import use_of
from broker.codec import encode_job
from broker.messages import Capacity
from broker.terms import DISPLACED_PER_ENQUEUE, Placement, QueueLimits, QueueState
from tests.broker.both_queues import BASE, BothQueues, make_job
from tests.broker.scripts_clock import START_MS, Clock

JOBS = 12
SIZE = len(encode_job(make_job("a/00", "a")))


async def full_queue(redis: Redis, limits: QueueLimits, tenants: str = "ab") -> BothQueues:
    """Two greedy tenants ask until they are refused."""
    both = BothQueues(redis, limits)
    await both.start()
    for number in range(2 * JOBS):
        for tenant in tenants:
            await both.enqueue(make_job(f"{tenant}/{number:02}", tenant))
    assert len(both.model.waiting) == JOBS
    return both


@pytest.mark.parametrize("limits", [QueueLimits(jobs=JOBS), QueueLimits(bytes=JOBS * SIZE)], ids=["jobs", "bytes"])
async def test_two_tenants_do_not_lock_out_a_third(redis: Redis, clock: Clock, limits: QueueLimits) -> None:
    both = await full_queue(redis, limits)
    accepted = [not await both.enqueue(make_job(f"c/{number:02}", "c")) for number in range(JOBS)]
    assert accepted == [True] * (JOBS // 3) + [False] * (JOBS - JOBS // 3)
    assert {tenant: len(both.model.waiting.queue(tenant)) for tenant in "abc"} == dict.fromkeys("abc", JOBS // 3)
    assert len(both.model.waiting) == JOBS


async def test_the_last_in_line_of_the_heaviest_tenant_loses_its_place(redis: Redis, clock: Clock) -> None:
    both = await full_queue(redis, QueueLimits(jobs=JOBS), "b")
    await both.enqueue(make_job("b/urgent", "b", priority=1))
    assert not await both.enqueue(make_job("c", "c"))
    assert await both.look_up(("b/11", 1), ("b/10", 1), ("c", 1)) == [
        QueueState.DISPLACED,
        QueueState.WAITS,
        QueueState.WAITS,
    ]
    await both.finish("b/11", 1)
    assert await both.look_up(("b/11", 1)) == [QueueState.ABSENT]


async def test_an_enqueue_that_comes_again_after_the_displacement_waits_again(redis: Redis, clock: Clock) -> None:
    both = await full_queue(redis, QueueLimits(jobs=JOBS), "b")
    assert not await both.enqueue(make_job("c", "c"))
    assert not await both.enqueue(make_job("b/11", "b", attempt=2))
    assert await both.look_up(("b/11", 2)) == [QueueState.WAITS]
    assert await redis.pttl("lp:{tiny/main}:job:b/11") == -1


async def test_claimed_jobs_are_no_use_of_the_queue(redis: Redis, clock: Clock) -> None:
    """The uses in Redis are corrected only when they are looked at."""
    both = await full_queue(redis, QueueLimits(jobs=JOBS))
    capacity = Capacity(rows=JOBS // 2, rows_limit=JOBS, tokens=10_000, max_tokens=4096, max_rank=64)
    await both.finish("a/00", 1)
    assert not await both.enqueue(make_job("b/more", "b"))
    assert len((await both.claim("w", capacity)).jobs) == JOBS // 2
    for number in range(JOBS):
        await both.enqueue(make_job(f"c/{number:02}", "c"))
    assert [len(both.model.waiting.queue(tenant)) for tenant in "abc"] == [2, 4, 6]
    for number in range(JOBS):
        await both.enqueue(make_job(f"a/more{number:02}", "a"))
    assert [len(both.model.waiting.queue(tenant)) for tenant in "abc"] == [4, 4, 4]


async def test_twice_the_weight_has_twice_the_share(redis: Redis, clock: Clock) -> None:
    both = await full_queue(redis, QueueLimits(jobs=JOBS))
    for number in range(JOBS):
        await both.enqueue(make_job(f"c/{number:02}", "c"), Placement(weight=2.0))
    assert {tenant: len(both.model.waiting.queue(tenant)) for tenant in "abc"} == {"a": 3, "b": 3, "c": 6}


@pytest.mark.parametrize("limits", [QueueLimits(jobs=JOBS), QueueLimits(bytes=JOBS * SIZE)], ids=["jobs", "bytes"])
async def test_jobs_that_have_begun_take_no_newcomers_place(redis: Redis, clock: Clock, limits: QueueLimits) -> None:
    """They wait before all newcomers and can't be displaced, so that no newcomer could have a place again."""
    both = BothQueues(redis, limits)
    await both.start()
    for number in range(2 * JOBS):
        assert not await both.enqueue(make_job(f"begun/{number:02}", "a", attempt=2))
    for number in range(JOBS):
        assert not await both.enqueue(make_job(f"{'ab'[number % 2]}/{number:02}", "ab"[number % 2]))
    assert await both.enqueue(make_job("c/refused", "a"))
    assert not await both.enqueue(make_job("c", "c"))


@settings(max_examples=30, derandomize=True, deadline=None, database=None)
@given(seed=integers(0, 1 << 32))
def test_nobody_is_refused_while_another_uses_more(seed: int) -> None:
    """Check it with any number of tenants, sizes and weights; the sum of all stays within the limits."""
    chance = random.Random(seed)
    limits = QueueLimits(jobs=chance.randint(1, 30), bytes=chance.randint(1, 30) * SIZE)
    model, count = QueueModel(limits), chance.randint(1, 40)
    weights = {f"t{number}": chance.choice((0.5, 1.0, 3.0)) for number in range(count)}
    capacity = Capacity(rows=2, rows_limit=8, tokens=10_000, max_tokens=4096, max_rank=64)
    waiting = model.waiting
    for number in range(150):
        tenant = chance.choice(list(weights)[: chance.randint(1, count)])
        begun = chance.random() < 0.1
        job = make_job(f"{number}", tenant, prompt=chance.choice((1, 4, 4, 100)), attempt=1 + begun)
        refusal = model.enqueue(job, Placement(weights[tenant], begun=begun), START_MS)
        assert len(waiting) - len(waiting.redispatched) <= limits.jobs
        assert waiting.newcomers_bytes <= limits.bytes
        if refusal is not None:
            jobs, size = len(waiting.queue(tenant)) + 1, waiting.newcomer_bytes_of(tenant) + len(encode_job(job))
            own = use_of(jobs, size, weights[tenant], limits)
            others = (waiting.use(name, limits) for name in weights if waiting.queue(name))
            assert max(others, default=0.0) <= own
        if chance.random() < 0.2:
            model.claim("w", BASE, capacity, START_MS)


def test_one_large_job_displaces_a_bounded_number_of_small_ones() -> None:
    model = QueueModel(QueueLimits(bytes=10 * DISPLACED_PER_ENQUEUE * SIZE))
    for number in range(10 * DISPLACED_PER_ENQUEUE):
        assert model.enqueue(make_job(f"a/{number:02}", "a"), Placement(), START_MS) is None or number > 500
    before = len(model.waiting)
    large = make_job("b", "b", prompt=3 * DISPLACED_PER_ENQUEUE * SIZE // 2)
    while model.enqueue(large, Placement(), START_MS) is not None:  # a client that calls again
        assert before - len(model.waiting) == DISPLACED_PER_ENQUEUE
        before = len(model.waiting)
    assert model.waiting.find("b") is not None
