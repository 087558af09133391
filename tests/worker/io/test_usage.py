"""What a worker reports of its jobs reaches their tenants' counters, once."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from broker.keys import Keys
from broker.messages import Capacity, Job, StoppingParams
from broker.queue import JobQueue
from broker.terms import OUTPUT_WEIGHT
from worker.io.jobs.usage import UsageLog
from worker.io.local_jobs.jobs import LocalJobs

KEYS = Keys("tiny", "main")


async def test_held_and_ended_jobs_are_charged_though_redis_fails_meanwhile(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, held = JobQueue(redis, KEYS, worker_id="w"), LocalJobs()
    usage = UsageLog(held, queue)
    for name in ("a", "b", "unrun"):
        await queue.enqueue(Job(name, "acme", "tiny", "sha256:0", "here", (1, 2, 3), StoppingParams(9), 1, n=2))
    await queue.enqueue(Job("waits", "acme", "tiny", "sha256:0", "here", (1,), StoppingParams(9), 1))
    jobs = (await queue.claim("sha256:0", Capacity(6, 6, 1000, 100, 8))).jobs
    a, b, unrun = (held.add(job) for job in jobs)

    async def counter() -> float | None:
        return await redis.zscore(KEYS.prefix + "tenants", "acme")

    assert await counter() == 9
    for one in (a, b):
        for choice in one.running:
            choice.in_engine = True
            choice.ids += [7, 8]
    await usage.report()
    await usage.report()
    assert await counter() == 9 + OUTPUT_WEIGHT * 8
    a.choices[1].ids.append(9)
    for one in (a, unrun):
        held.pop(one.job.job_id, 1)
        usage.ended(one)
    with monkeypatch.context() as patch:
        patch.setattr(queue, "charge", _down)
        with pytest.raises(ConnectionError):
            await usage.report()
    with usage.last_reports() as reports:  # as a claim tells them
        assert [(one.job_id, one.ran) for one in reports] == [("a", True), ("unrun", False)]
        assert (await queue.claim("sha256:0", Capacity(0, 6, 1000, 100, 8), reports)).waiting == 1
    # What never ran is given back.
    assert await counter() == 9 + OUTPUT_WEIGHT * 9 - 3
    await asyncio.gather(usage.report(), usage.report())
    assert await counter() == 9 + OUTPUT_WEIGHT * 9 - 3


async def test_what_a_stopped_answer_has_made_is_charged_too(redis: Redis) -> None:
    queue, held = JobQueue(redis, KEYS, worker_id="w"), LocalJobs()
    usage = UsageLog(held, queue)
    for name in ("a", "waits"):
        await queue.enqueue(Job(name, "acme", "tiny", "sha256:0", "here", (1, 2, 3), StoppingParams(9), 1, n=2))
    (job,) = (await queue.claim("sha256:0", Capacity(2, 2, 1000, 100, 8))).jobs
    one = held.add(job)
    first = one.choices[0]
    first.in_engine = True
    first.ids += [7, 8]
    assert one.drop(0) is first
    assert one.drop(0) is None
    await usage.report()
    assert await redis.zscore(KEYS.prefix + "tenants", "acme") == 3 + OUTPUT_WEIGHT * 2
    one.drop(1)  # before it was handed to the engine
    held.pop(job.job_id, 1)
    usage.ended(one)
    await usage.report()
    assert await redis.zscore(KEYS.prefix + "tenants", "acme") == 3 + OUTPUT_WEIGHT * 2


async def _down(reports: object) -> None:
    raise ConnectionError("down")
