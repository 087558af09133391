"""Answers that had begun at another router: no limit refuses them, no newcomer goes before them, and nobody gains."""

from __future__ import annotations

from dataclasses import replace

from redis.asyncio import Redis

from loraplex.contracts.broker.messages import Capacity
from loraplex.contracts.broker.terms import (
    CLAIM_RATE_MIN_MS,
    RESUME_LEAD_MS,
    RESUME_LEAD_WORK,
    QueueLimits,
    UsageReport,
)
from tests.broker.clocked_queue import Clock, ClockedQueue, make_job

ROOMY = Capacity(rows=8, rows_limit=8, tokens=1 << 30, max_tokens=1 << 30, max_rank=64)
ONE = replace(ROOMY, rows=1)


async def claim(queue: ClockedQueue, capacity: Capacity = ONE) -> list[str]:
    return [job.job_id for job in (await queue.claim("w", capacity)).jobs]


async def test_a_full_queue_takes_what_has_begun_and_hands_it_out_first(redis: Redis, clock: Clock) -> None:
    queue = ClockedQueue(redis, QueueLimits(jobs=6, tenant_jobs=4))
    await queue.start()
    for number in range(4):
        await queue.enqueue(make_job(f"a{number}", "a", priority=100))
    for number in range(2):
        await queue.enqueue(make_job(f"b{number}", "b", priority=100))
    assert await queue.enqueue(make_job("new", "a")) == "tenant_jobs"
    resumed = [f"resumed{number}" for number in range(4)]
    for job_id in resumed:
        assert not await queue.enqueue(make_job(job_id, "a", resumed=True, priority=-100))
    assert await claim(queue, replace(ROOMY, rows=4)) == resumed


async def test_a_resumed_job_is_charged_for_what_is_computed_again(queue: ClockedQueue) -> None:
    job = replace(make_job("j", "a", prompt=4, resumed=True), emitted={0: (1, 2, 3)})
    await queue.enqueue(job)
    assert await claim(queue) == ["j"]
    assert await queue.counter("a") == 7
    # A later attempt at the same router costs nothing.
    await queue.enqueue(replace(job, attempt=2, emitted={0: (1, 2, 3, 4)}))
    assert await claim(queue) == ["j"]
    assert await queue.counter("a") == 7


async def contended(queue: ClockedQueue) -> int:
    """Let two tenants wait for a worker that claims one job a second; returns the maximum lead in charged tokens."""
    for number in range(10):
        for tenant in "ab":
            await queue.enqueue(make_job(f"{tenant}{number}", tenant, max_tokens=1_000))
    for step in range(1 + CLAIM_RATE_MIN_MS // 1_000):
        await queue.advance(1_000 if step else 0)
        assert len(await claim(queue)) == 1
    lead = (4 + 2 * 1_000) * RESUME_LEAD_MS // 1_000
    assert lead > RESUME_LEAD_WORK
    return lead


async def test_a_tenant_that_resumes_again_and_again_passes_others_for_a_bounded_time(queue: ClockedQueue) -> None:
    lead = await contended(queue)
    for number in range(25):  # each is a twentieth of what it may lead by
        assert not await queue.enqueue(make_job(f"again{number}", "a", prompt=lead // 20 - 17, resumed=True))
    ahead = await queue.begun()
    assert 18 <= len(ahead) <= 21
    assert not await queue.enqueue(make_job("other", "b", resumed=True))
    assert await queue.begun() == [*ahead, "other"]
    assert await claim(queue, replace(ROOMY, rows=len(ahead) + 1)) == [*ahead, "other"]


async def test_a_tenant_that_was_served_much_more_than_another_that_waits_resumes_in_its_turn(
    queue: ClockedQueue,
) -> None:
    lead = await contended(queue)
    await queue.charge(UsageReport("a0", 1, lead))  # output costs twice
    assert not await queue.enqueue(make_job("much", "a", resumed=True))
    assert not await queue.enqueue(make_job("less", "b", resumed=True))
    assert await claim(queue, replace(ROOMY, rows=2)) == ["less", "b1"]


async def test_nothing_is_stored_up_while_nobody_else_waits(queue: ClockedQueue) -> None:
    """Before any rate is measured, a tenant alone gets as much as it could pass others by."""
    for number in range(12):
        assert not await queue.enqueue(make_job(f"{number}", "a", prompt=RESUME_LEAD_WORK // 10 - 17, resumed=True))
    assert len(await queue.begun()) == 11
