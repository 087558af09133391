"""Usage of local jobs, which reaches their tenants' counters once."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import Capacity, Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import OUTPUT_WEIGHT
from loraplex.contracts.options import Encode, FinishReason, StoppingParams
from loraplex.worker.engine_api import Output
from loraplex.worker.io.local_jobs import LocalJobs
from loraplex.worker.io.results import TokenReports

KEYS = Keys("tiny", "main")


async def test_running_and_ended_jobs_are_charged_though_redis_fails_meanwhile(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, jobs = JobQueue(redis, KEYS, worker_id="w"), LocalJobs()
    usage = TokenReports(jobs, queue)
    for name in ("a", "b", "unrun"):
        await queue.enqueue(Job(name, "acme", "tiny", "sha256:0", "here", (1, 2, 3), StoppingParams(9), n=2))
    await queue.enqueue(Job("waits", "acme", "tiny", "sha256:0", "here", (1,), StoppingParams(9)))
    claimed = (await queue.claim("sha256:0", Capacity(6, 6, 1000, 100, 8))).jobs
    a, b, unrun = (jobs.add(job) for job in claimed)

    async def counter() -> float | None:
        return await redis.zscore(KEYS.prefix + "tenants", "acme")

    assert await counter() == 9
    for local in (a, b):
        for choice in local.running:
            choice.hand_over(1, 0.0)
            choice.ids += [7, 8]
    await usage.report()
    await usage.report()
    assert await counter() == 9 + OUTPUT_WEIGHT * 8
    a.choices[1].ids.append(9)
    for local in (a, unrun):
        jobs.remove(local.job.job_id, 1)
        usage.ended(local)
    with monkeypatch.context() as patch:
        patch.setattr(queue, "charge", _down)
        with pytest.raises(ConnectionError):
            await usage.report()
    with usage.last_reports() as reports:  # as a claim tells them
        assert [(report.job_id, report.ran) for report in reports] == [("a", True), ("unrun", False)]
        assert (await queue.claim("sha256:0", Capacity(0, 6, 1000, 100, 8), reports)).waiting == 1
    # The charge for a job that never ran is given back.
    assert await counter() == 9 + OUTPUT_WEIGHT * 9 - 3
    await asyncio.gather(usage.report(), usage.report())
    assert await counter() == 9 + OUTPUT_WEIGHT * 9 - 3


async def test_tokens_of_a_stopped_answer_are_charged_too(redis: Redis) -> None:
    queue, jobs = JobQueue(redis, KEYS, worker_id="w"), LocalJobs()
    usage = TokenReports(jobs, queue)
    for name in ("a", "waits"):
        await queue.enqueue(Job(name, "acme", "tiny", "sha256:0", "here", (1, 2, 3), StoppingParams(9), n=2))
    (job,) = (await queue.claim("sha256:0", Capacity(2, 2, 1000, 100, 8))).jobs
    local = jobs.add(job)
    first = local.choices[0]
    first.hand_over(1, 0.0)
    first.ids += [7, 8]
    assert jobs.drop_choice(local, 0) is first
    assert jobs.drop_choice(local, 0) is None
    await usage.report()
    assert await redis.zscore(KEYS.prefix + "tenants", "acme") == 3 + OUTPUT_WEIGHT * 2
    jobs.drop_choice(local, 1)  # before it was handed to the engine
    jobs.remove(job.job_id, 1)
    usage.ended(local)
    await usage.report()
    assert await redis.zscore(KEYS.prefix + "tenants", "acme") == 3 + OUTPUT_WEIGHT * 2


async def _down(reports: object) -> None:
    raise ConnectionError("down")


def test_a_vector_counts_as_a_token_which_clears_a_suspect() -> None:
    """Otherwise one engine's death would let the texts of a tenant begin one at a time for a minute."""
    jobs = LocalJobs()
    usage = TokenReports(jobs, JobQueue(Redis(), KEYS, worker_id="w"))
    text = Job("a", "acme", "tiny", "sha256:0", "here", (1, 2), StoppingParams(0), encode=Encode("embed"), strikes=1)
    local = jobs.add(text)
    (choice,) = local.running
    choice.hand_over(1, 0.0)
    choice.begin()
    with usage.last_reports() as reports:
        assert not reports
    choice.record(Output(choice.sequence_id, 0, (), FinishReason.LENGTH, vector=(0.5,)))
    with usage.last_reports() as reports:
        assert [(report.tokens, report.ended) for report in reports] == [(1, False)]
    assert jobs.remove("a", 1) is local
    usage.ended(local)
    with usage.last_reports() as reports:
        assert [(report.tokens, report.ended) for report in reports] == [(1, True)]
