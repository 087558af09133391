"""Who reads a request that runs: takeover, another body, calls at the same moment, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from broker.messages import Job
from broker.queue import JobQueue
from broker.terms import Placement
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.routed_job import Frame, WorkerFinish
from router.generation.resume import Began, ResumeClaims, Resumption
from router.generation.runs import Run, Runs
from router.request import Received, Request
from rpc.errors import Aborted, AlreadyExists, Exhausted, Unavailable
from tests.router.recording_link import KEYS, RecordingLink, job, read

REQUEST = Request("acme", "x", "prompt", request_id="j", fingerprint="one")
BEGAN = Began(0, 0.0, 0.0, 0.0, 0.0)
CLAIMS = ResumeClaims("j", "one", "tiny", "sha256:0", None, seed=1, max_tokens=100, began=BEGAN)


@pytest.fixture
def dispatcher(redis: Redis) -> Dispatcher:
    queue = JobQueue(redis, KEYS)
    return Dispatcher(lambda _: queue, lambda _: Placement())


class Jobs:
    """Makes the jobs of one request, and counts them."""

    def __init__(self) -> None:
        self.made = 0

    async def __call__(self) -> Job:
        self.made += 1
        await asyncio.sleep(0)
        return replace(job(), job_id=f"j{self.made}")


async def test_the_last_of_many_calls_reads_what_is_computed_once(dispatcher: Dispatcher) -> None:
    runs, jobs = Runs(dispatcher), Jobs()
    link = RecordingLink("w")

    async def call() -> list[int]:
        async with runs.read(REQUEST, None, jobs) as run:
            dispatcher.frame(link, Frame(run.routed.job.job_id, 1, 0, (5, 6)))
            return await read(run.routed)

    # All at once: the later ones wait until the first has been admitted.
    calls = [asyncio.create_task(call()) for _ in range(4)]
    ended = await asyncio.gather(*calls[:3], return_exceptions=True)
    assert [type(one) for one in ended] == [Aborted] * 3
    (routed,) = dispatcher.jobs
    dispatcher.frame(link, Frame(routed.job.job_id, 1, 2, (7,), finish=WorkerFinish.END))
    assert await calls[3] == [5, 6, 7]
    assert jobs.made == 1
    assert dispatcher.jobs == ()
    await dispatcher.drain_tasks()
    assert link.sent == [("ack", "j1", 1)]


async def test_another_body_or_tenant_is_another_request(dispatcher: Dispatcher) -> None:
    runs, jobs = Runs(dispatcher), Jobs()
    async with runs.read(REQUEST, None, jobs) as run:
        with pytest.raises(AlreadyExists):
            async with runs.read(replace(REQUEST, fingerprint="two"), None, jobs):
                pass
        async with runs.read(replace(REQUEST, tenant="globex"), None, jobs) as other:
            assert other.routed is not run.routed
        # The first one never noticed.
        dispatcher.frame(RecordingLink("w"), Frame("j1", 1, 0, (5,), finish=WorkerFinish.END))
        assert await read(run.routed) == [5]
    async with runs.read(replace(REQUEST, fingerprint="two"), None, jobs):
        pass
    await dispatcher.drain_tasks()


async def test_one_that_could_not_be_admitted_leaves_the_id_free(dispatcher: Dispatcher) -> None:
    runs, jobs = Runs(dispatcher), Jobs()

    async def refuse() -> Job:
        await asyncio.sleep(0)
        raise Exhausted("queue", "full", retry_after_s=1.0)

    async def enter(make: Callable[[], Awaitable[Job]]) -> None:
        async with runs.read(REQUEST, None, make):
            pass

    refused, entered = await asyncio.gather(enter(refuse), enter(jobs), return_exceptions=True)
    assert isinstance(refused, Exhausted)
    assert entered is None
    assert jobs.made == 1
    await dispatcher.drain_tasks()


RESUMPTIONS = {
    "the same": (Resumption(CLAIMS, {0: Received((5, 6))}), True),
    "another seed": (Resumption(replace(CLAIMS, seed=2), {0: Received((5, 6))}), False),
    "another base": (Resumption(replace(CLAIMS, base_digest="sha256:1"), {0: Received((5, 6))}), False),
    "from the start": (Resumption(CLAIMS), True),
}


@pytest.mark.parametrize("kind", RESUMPTIONS)
async def test_a_resume_reads_what_runs_if_it_is_its_own(dispatcher: Dispatcher, kind: str) -> None:
    resumption, same = RESUMPTIONS[kind]
    runs, jobs = Runs(dispatcher), Jobs()
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        older = await first.enter_async_context(runs.read(REQUEST, None, jobs))
        newer = await second.enter_async_context(runs.read(REQUEST, resumption, jobs))
        assert (newer is older) == same
        assert jobs.made == (1 if same else 2)
        assert [routed.job.job_id for routed in dispatcher.jobs] == [newer.routed.job.job_id]
        assert newer.resumes == (0 if same else 1)
    assert dispatcher.jobs == ()
    await dispatcher.drain_tasks()


async def test_what_was_resumed_later_serves_nobody_who_has_less(dispatcher: Dispatcher) -> None:
    runs, jobs = Runs(dispatcher), Jobs()

    async def entered(stack: AsyncExitStack, *received: int, resumed: bool = True) -> Run:
        resumption = Resumption(CLAIMS, {0: Received(received)}) if resumed else None
        return await stack.enter_async_context(runs.read(REQUEST, resumption, jobs))

    async with AsyncExitStack() as stack:
        run = await entered(stack, 5, 6)
        assert await entered(stack, 5, 6, 7) is run
        less = await entered(stack, 5)
        assert less is not run
        whole = await entered(stack, resumed=False)
        assert whole is not less
        assert jobs.made == 3
        assert len(tuple(dispatcher.jobs)) == 1
    await dispatcher.drain_tasks()


async def test_a_drain_ends_every_call(dispatcher: Dispatcher) -> None:
    runs, jobs, entered = Runs(dispatcher), Jobs(), asyncio.Event()

    async def call() -> list[int]:
        async with runs.read(REQUEST, None, jobs) as run:
            entered.set()
            return await read(run.routed)

    running = asyncio.create_task(call())
    await entered.wait()
    runs.drain()
    for ended in (running, asyncio.create_task(call())):
        with pytest.raises(Unavailable) as raised:
            await ended
        assert raised.value.reason == "ROUTER_DRAINING"
    assert dispatcher.jobs == ()
    assert jobs.made == 1
    await dispatcher.drain_tasks()
