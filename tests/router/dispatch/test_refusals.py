"""Refusals of a full queue and of deadlines that can't be met, as the client gets them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from redis.asyncio import Redis

from loraplex.contracts.broker.functions import LIBRARY, Library
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import Capacity, Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import CLAIM_RATE_MIN_MS, KeyTerms, Placement, QueueLimits
from loraplex.contracts.options import StoppingParams
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import DispatchTiming
from loraplex.router.dispatch.outbox import Placer
from loraplex.router.metrics import RouterMetrics
from loraplex.runtime.rpc.errors import DeadlinePassed, Exhausted
from tests.broker.clocked_queue import LIBRARY_ON_TEST_CLOCK, Clock
from tests.router.recording_link import dispatched, read

KEYS = Keys("tiny", "main")
JOB = Job("j", "acme", "tiny", "sha256:0", "here", (1, 2), StoppingParams(100), request_id="j")
ONE = Capacity(rows=1, rows_limit=1, tokens=1000, max_tokens=1000, max_rank=0)


def dispatcher_of(
    redis: Redis, limits: QueueLimits | None = None, library: Library = LIBRARY
) -> tuple[Dispatcher, JobQueue]:
    queue = JobQueue(redis, KEYS, limits=limits, library=library)
    return Dispatcher(lambda *_: queue, lambda *_: Placement()), queue


async def test_a_full_queue_names_whose_it_is_and_spreads_the_retries(redis: Redis) -> None:
    dispatcher, _ = dispatcher_of(redis, QueueLimits(tenant_jobs=1))
    delays = set()
    async with dispatched(dispatcher, JOB):
        for number in range(5):
            with pytest.raises(Exhausted) as refused:
                async with dispatched(dispatcher, replace(JOB, job_id=f"{number}", request_id=f"{number}")):
                    pass
            assert (refused.value.reason, refused.value.subject) == ("QUEUE_FULL", "tenants/acme/queue")
            delays.add(refused.value.retry_after_s)
        async with dispatched(dispatcher, replace(JOB, job_id="other", tenant="beta")):
            pass
    assert len(delays) == 5
    await dispatcher.drain_tasks()


async def test_a_full_redis_is_told_as_such(redis: Redis) -> None:
    dispatcher, _ = dispatcher_of(redis)
    async with dispatched(dispatcher, JOB):
        await redis.config_set("maxmemory", "1")
        try:
            with pytest.raises(Exhausted, match="Redis is out of memory") as refused:
                async with dispatched(dispatcher, replace(JOB, job_id="other", request_id="other")):
                    pass
        finally:
            await redis.config_set("maxmemory", "0")
    assert (refused.value.reason, refused.value.subject) == ("REDIS_FULL", "redis")
    await dispatcher.drain_tasks()


async def test_a_call_beyond_its_key_s_share_of_the_queue_is_told_of_the_key(redis: Redis) -> None:
    queue, terms = JobQueue(redis, KEYS, limits=QueueLimits(jobs=8)), KeyTerms("0123456789abcdef", queue_share=0.125)
    placer = Placer(lambda *_: [], lambda _: 1.0, 0.0, calling_key_terms=lambda: terms)
    dispatcher = Dispatcher(lambda *_: queue, placer.place)
    async with dispatched(dispatcher, JOB):
        with pytest.raises(Exhausted) as refused:
            async with dispatched(dispatcher, replace(JOB, job_id="more")):
                pass
        terms = KeyTerms()
        async with dispatched(dispatcher, replace(JOB, job_id="of another key")):
            pass
    assert refused.value.subject == "keys/0123456789abcdef/quotas/queue_share"
    assert str(refused.value) == "the queue is full: 1 jobs may wait of API key 0123456789abcdef"
    assert refused.value.reason == "QUEUE_FULL"
    assert refused.value.retry_after_s
    await dispatcher.drain_tasks()
    assert not await redis.exists(f"{KEYS.prefix}queue:acme/keys")


async def test_a_job_that_another_tenant_displaced_ends_as_if_it_had_been_refused(redis: Redis) -> None:
    queue, metrics = JobQueue(redis, KEYS, limits=QueueLimits(jobs=2)), RouterMetrics()
    dispatcher = Dispatcher(lambda *_: queue, lambda *_: Placement(), metrics, DispatchTiming(look_s=0.01))
    watch = asyncio.create_task(dispatcher.redispatch_missing())
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(dispatched(dispatcher, JOB))
        last = await stack.enter_async_context(dispatched(dispatcher, replace(JOB, job_id="last")))
        await stack.enter_async_context(dispatched(dispatcher, replace(JOB, job_id="other", tenant="beta")))
        with pytest.raises(Exhausted) as displaced:
            await read(last)
        assert (displaced.value.reason, displaced.value.subject) == ("QUEUE_FULL", "tenants/acme/queue")
        assert displaced.value.retry_after_s
        assert last.job.attempt == 1
        assert b"loraplex_jobs_displaced_total 1.0" in generate_latest(metrics.registry)
        assert await queue.count_waiting() == 2
    watch.cancel()
    await dispatcher.drain_tasks()
    assert not await redis.keys("*:job:*")


async def test_another_router_takes_what_had_begun_though_the_tenant_s_queue_is_full(redis: Redis) -> None:
    limits = QueueLimits(jobs=1, tenant_jobs=1)
    (router, queue), (other, _) = dispatcher_of(redis, limits), dispatcher_of(redis, limits)
    async with dispatched(router, JOB):
        with pytest.raises(Exhausted):
            async with dispatched(other, replace(JOB, job_id="new")):
                pass
        async with dispatched(other, replace(JOB, job_id="begun", resumed=True, emitted={0: (5,)})):
            assert [job.job_id for job in (await queue.claim("sha256:0", ONE)).jobs] == ["begun"]
    for dispatcher in (router, other):
        await dispatcher.drain_tasks()


async def test_a_deadline_that_can_not_be_met_is_refused_at_once(redis: Redis) -> None:
    clock = Clock(redis)
    dispatcher, queue = dispatcher_of(redis, library=LIBRARY_ON_TEST_CLOCK)
    await clock.advance(0)
    async with AsyncExitStack() as stack:
        for number in range(30):
            job = replace(JOB, job_id=f"{number}", request_id=f"{number}")
            await stack.enter_async_context(dispatched(dispatcher, job))
        for step in range(3):
            await clock.advance(CLAIM_RATE_MIN_MS if step else 0)
            assert (await queue.claim("sha256:0", ONE)).jobs
        # Claims take a job every two seconds, so the last of 27 waits for about a minute.
        with pytest.raises(Exhausted) as refused:
            async with dispatched(dispatcher, replace(JOB, deadline_ms=10_000, priority=-1)):
                pass
        assert refused.value.reason == "DEADLINE_UNATTAINABLE"
        assert (refused.value.retry_after_s or 0) > 10
        async with dispatched(dispatcher, replace(JOB, deadline_ms=60_000, priority=-1)):
            pass
    await dispatcher.drain_tasks()
    assert await queue.count_waiting() == 0


async def test_a_clock_that_was_ahead_for_a_moment_refuses_no_deadline(redis: Redis) -> None:
    clock = Clock(redis)
    dispatcher, queue = dispatcher_of(redis, library=LIBRARY_ON_TEST_CLOCK)
    await clock.advance(0)
    async with AsyncExitStack() as stack:
        for number in range(30):
            job = replace(JOB, job_id=f"{number}", request_id=f"{number}")
            await stack.enter_async_context(dispatched(dispatcher, job))
        for step_ms in (0, CLAIM_RATE_MIN_MS, 600_000, 100, -600_000, 100):
            await clock.advance(step_ms)
            for moment in ("before a claim", "after it"):
                job_id = f"{step_ms} {moment}"
                async with dispatched(dispatcher, replace(JOB, job_id=job_id, deadline_ms=900_000, priority=-1)):
                    pass
                assert (await queue.claim("sha256:0", ONE)).jobs
    await dispatcher.drain_tasks()


async def test_a_job_whose_deadline_passed_in_the_queue_ends_and_is_not_dispatched_again(redis: Redis) -> None:
    dispatcher, queue = dispatcher_of(redis)
    watch = asyncio.create_task(dispatcher.redispatch_missing())
    async with dispatched(dispatcher, replace(JOB, deadline_ms=1)) as routed:
        while await queue.count_waiting():
            assert (await queue.claim("sha256:0", replace(ONE, rows=0))).jobs == []
        with pytest.raises(DeadlinePassed):
            await read(routed)
        assert routed.job.attempt == 1
    watch.cancel()
    await dispatcher.drain_tasks()
