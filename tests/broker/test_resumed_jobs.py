"""Answers that had begun at another router: no limit refuses them, no newcomer goes before them, and nobody gains."""

from __future__ import annotations

from dataclasses import replace

from redis.asyncio import Redis

from broker.messages import Capacity
from broker.terms import CLAIM_RATE_MIN_MS, RESUME_LEAD_MS, RESUMED_LIMITS, QueueLimits, QueueState, UsageReport
from tests.broker.both_queues import BothQueues, make_job
from tests.broker.scripts_clock import Clock

ROOMY = Capacity(rows=8, rows_limit=8, tokens=1 << 30, max_tokens=1 << 30, max_rank=64)
ONE = replace(ROOMY, rows=1)


async def claim(both: BothQueues, capacity: Capacity = ONE) -> list[str]:
    return [job.job_id for job in (await both.claim("w", capacity)).jobs]


async def test_a_full_queue_takes_what_has_begun_and_hands_it_out_first(redis: Redis, clock: Clock) -> None:
    both = BothQueues(redis, QueueLimits(jobs=6, tenant_jobs=4))
    await both.start()
    for number in range(4):
        await both.enqueue(make_job(f"a{number}", "a", priority=100))
    for number in range(2):
        await both.enqueue(make_job(f"b{number}", "b", priority=100))
    assert await both.enqueue(make_job("new", "a")) == "tenant_jobs"
    resumed = [f"resumed{number}" for number in range(4)]
    for job_id in resumed:
        assert not await both.enqueue(make_job(job_id, "a", resumed=True, priority=-100))
    assert await claim(both, replace(ROOMY, rows=4)) == resumed


async def test_a_resumed_job_is_charged_for_what_is_computed_again(both: BothQueues) -> None:
    job = replace(make_job("j", "a", prompt=4, resumed=True), emitted={0: (1, 2, 3)})
    await both.enqueue(job)
    assert await claim(both) == ["j"]
    assert await both.counter("a") == 7
    # A later attempt at the same router costs nothing.
    await both.enqueue(replace(job, attempt=2, emitted={0: (1, 2, 3, 4)}))
    assert await claim(both) == ["j"]
    assert await both.counter("a") == 7


async def contended(both: BothQueues) -> float:
    """Let two tenants wait for a worker that claims one job a second; returns the claimed work in a ms."""
    for number in range(10):
        for tenant in "ab":
            await both.enqueue(make_job(f"{tenant}{number}", tenant))
    for step in range(1 + CLAIM_RATE_MIN_MS // 1_000):
        await both.advance(1_000 if step else 0)
        assert len(await claim(both)) == 1
    work = 4 + 2 * 8
    return CLAIM_RATE_MIN_MS // 1_000 * work / CLAIM_RATE_MIN_MS


async def test_a_tenant_that_resumes_again_and_again_passes_others_for_a_bounded_time(both: BothQueues) -> None:
    rate = await contended(both)
    lead = int(RESUME_LEAD_MS * rate)
    for number in range(20):  # each is a twentieth of what it may lead by
        assert not await both.enqueue(make_job(f"again{number}", "a", prompt=lead // 20 - 16, resumed=True))
    ahead = [job_id for _, job_id in both.model.waiting.redispatched]
    assert 18 <= len(ahead) <= 20
    assert not await both.enqueue(make_job("beyond", "a", prompt=lead // 10, resumed=True))
    assert "beyond" not in [job_id for _, job_id in both.model.waiting.redispatched]
    # Another tenant's answers go first all the same.
    assert not await both.enqueue(make_job("other", "b", resumed=True))
    assert [job_id for _, job_id in both.model.waiting.redispatched][-1] == "other"
    assert await claim(both, replace(ROOMY, rows=len(ahead) + 1)) == [*ahead, "other"]


async def test_a_tenant_that_was_served_much_more_than_another_that_waits_resumes_in_its_turn(both: BothQueues) -> None:
    lead = int(RESUME_LEAD_MS * await contended(both))
    await both.charge(UsageReport("a0", 1, lead))  # output costs twice
    assert not await both.enqueue(make_job("much", "a", resumed=True))
    assert not await both.enqueue(make_job("less", "b", resumed=True))
    assert await claim(both, replace(ROOMY, rows=2)) == ["less", "b1"]


async def test_without_another_tenant_that_waits_nothing_holds_back(redis: Redis, clock: Clock) -> None:
    both = BothQueues(redis, QueueLimits(jobs=4))
    await both.start()
    for number in range(2):
        await both.enqueue(make_job(f"a{number}", "a"))
    for step in range(3):
        await both.advance(CLAIM_RATE_MIN_MS if step else 0)
        await claim(both, replace(ROOMY, rows=0))
    for number in range(RESUMED_LIMITS * 4 - 2):
        assert not await both.enqueue(make_job(f"r{number}", "a", prompt=1 << 16, resumed=True))
    # The sum stays bounded all the same.
    assert await both.enqueue(make_job("one more", "a", resumed=True)) == "jobs"
    assert await both.look_up(("a1", 1)) == [QueueState.WAITS]
