"""Refusals of the queue and their statuses; placement of a job; settings of the queue."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from loraplex.inference.v1 import inference_pb2 as pb
from redis.asyncio import Redis

from broker.keys import Keys
from broker.messages import AdapterRef, Capacity, Job, StoppingParams, WorkerPhase, WorkerState
from broker.queue import JobQueue
from broker.rendezvous import WorkerLoad, preferred
from broker.scripts import SCRIPTS, Scripts
from broker.terms import CLAIM_RATE_MIN_MS, Placement, QueueLimits
from router.api.convert import read_request
from router.catalog.placement import MIB, Placer
from router.dispatch.dispatcher import Dispatcher
from router.settings import Settings, read_weights
from rpc.errors import DeadlinePassed, Exhausted, InvalidField
from tests.broker.scripts_clock import SCRIPTS_ON_TEST_CLOCK, Clock
from tests.router.recording_link import dispatched, read

KEYS = Keys("tiny", "main")
JOB = Job("j", "acme", "tiny", "sha256:0", "here", (1, 2), StoppingParams(100), 1, request_id="j")


def dispatcher_of(
    redis: Redis, limits: QueueLimits | None = None, scripts: Scripts = SCRIPTS
) -> tuple[Dispatcher, JobQueue]:
    queue = JobQueue(redis, KEYS, limits=limits, scripts=scripts)
    return Dispatcher(lambda _: queue, lambda _: Placement()), queue


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


async def test_a_deadline_that_can_not_be_met_is_refused_at_once(redis: Redis) -> None:
    clock = Clock(redis)
    dispatcher, queue = dispatcher_of(redis, scripts=SCRIPTS_ON_TEST_CLOCK)
    await clock.advance(0)
    one = Capacity(rows=1, rows_limit=1, tokens=1000, max_tokens=1000, max_rank=0)
    async with AsyncExitStack() as stack:
        for number in range(30):
            job = replace(JOB, job_id=f"{number}", request_id=f"{number}")
            await stack.enter_async_context(dispatched(dispatcher, job))
        for step in range(3):
            await clock.advance(CLAIM_RATE_MIN_MS if step else 0)
            assert (await queue.claim("sha256:0", one)).jobs
        # One every two seconds: the last of 27 has its turn in about a minute.
        with pytest.raises(Exhausted) as refused:
            async with dispatched(dispatcher, replace(JOB, deadline_ms=10_000, priority=-1)):
                pass
        assert refused.value.reason == "DEADLINE_UNATTAINABLE"
        assert (refused.value.retry_after_s or 0) > 10
        async with dispatched(dispatcher, replace(JOB, deadline_ms=60_000, priority=-1)):
            pass
    await dispatcher.drain_tasks()
    assert await queue.count_waiting() == 0


async def test_a_job_whose_deadline_passed_in_the_queue_ends_and_is_not_dispatched_again(redis: Redis) -> None:
    dispatcher, queue = dispatcher_of(redis)
    watch = asyncio.create_task(dispatcher.redispatch_missing())
    capacity = Capacity(rows=1, rows_limit=1, tokens=1000, max_tokens=1000, max_rank=0)
    async with dispatched(dispatcher, replace(JOB, deadline_ms=1)) as routed:
        while await queue.count_waiting():
            assert (await queue.claim("sha256:0", replace(capacity, rows=0))).jobs == []
        with pytest.raises(DeadlinePassed):
            await read(routed)
        assert routed.job.attempt == 1
    watch.cancel()
    await dispatcher.drain_tasks()


def test_priority_has_its_range() -> None:
    assert read_request(pb.GenerateSpec(prompt="x", priority=-100), "acme").priority == -100
    with pytest.raises(InvalidField, match="priority: 101 is not between -100 and 100"):
        read_request(pb.GenerateSpec(prompt="x", priority=101), "acme")


def test_weights_are_read_or_refused_by_name() -> None:
    assert read_weights("acme=3,globex=0.5") == {"acme": 3, "globex": 0.5}
    for bad in ("acme", "acme=", "=2", "acme=0", "acme=-1", "acme=inf", "acme=x"):
        with pytest.raises(ValueError, match="--tenant-weights"):
            Settings(store="s", redis_url="r", tenant_weights=bad)
    with pytest.raises(ValueError, match="--tenant-waiting-limit 0: at least 1"):
        Settings(store="s", redis_url="r", tenant_waiting_limit=0)


def worker(worker_id: str, *, used: int, max_rank: int = 64) -> WorkerState:
    kinds = {"int": 0, "str": ""}
    rest: dict[str, Any] = {name: kinds[kind] for name, kind in WorkerState.__annotations__.items() if kind in kinds}
    rest |= {"worker_id": worker_id, "rows_running": used, "rows_limit": 8, "max_rank": max_rank, "max_tokens": 1000}
    return WorkerState(phase=WorkerPhase.SERVING, adapters=(), **rest)


def test_a_job_prefers_able_workers_and_pays_for_its_adapter() -> None:
    states = [worker("busy", used=8), worker("free", used=0), worker("small", used=0, max_rank=8)]
    placer = Placer(lambda _: states, {"acme": 2.0}, 10.0)
    adapter = AdapterRef("r", "sha256:a", 16, 3 * MIB)
    assert placer.place(replace(JOB, adapter=adapter)) == Placement(2.0, ("free",), 30.0)
    assert placer.place(replace(JOB, tenant="other")) == Placement(1.0)
    loads = [WorkerLoad(name, 0, 8) for name in ("free", "small", "busy")]
    states[0] = worker("busy", used=0)
    small = replace(JOB, adapter=replace(adapter, rank=8))
    assert placer.place(small).prefer == preferred("sha256:a", loads)
