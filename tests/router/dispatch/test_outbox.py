"""Queue operations in the background lose no job: with many at once, while Redis is down, after unexpected faults."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from loraplex.contracts.broker.homes import Roster, WorkerLoad
from loraplex.contracts.broker.messages import AdapterRef, Capacity, Job, WorkerPhase, WorkerState
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import KeyTerms, Placement, QueueState
from loraplex.contracts.options import FinishReason, StoppingParams
from loraplex.contracts.plans import QUEUE_SHARE
from loraplex.router.app import _dispatcher
from loraplex.router.dispatch.cells import Cells
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import DispatchTiming, RelayReach
from loraplex.router.dispatch.outbox import AT_ONCE, FAULTS_LIMIT, MIB, Placer
from loraplex.router.metrics import RouterMetrics
from loraplex.router.settings import RouterSettings
from loraplex.runtime.rpc.errors import Internal, Unavailable
from loraplex.runtime.rpc.principal import CredentialKind, Principal, Role, set_caller
from tests.plans_file import plans_in
from tests.router.recording_link import KEYS, RecordingLink, claim, dispatched, frame, job, read


class ShakyQueue(JobQueue):
    """A real queue, whose calls first raise what `faults` has for them."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis, KEYS)
        self.faults: dict[str, list[Exception]] = {"enqueue": [], "finish": [], "look_up": []}
        self.calls: Counter[str] = Counter()
        self.in_flight = 0
        self.most_in_flight = 0
        self.called = asyncio.Condition()

    async def _call(self, name: str) -> None:
        async with self.called:
            self.calls[name] += 1
            self.called.notify_all()
        if self.faults[name]:
            raise self.faults[name].pop(0)

    async def enqueue(self, job: Job, placement: Placement | None = None) -> None:
        await self._call("enqueue")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await super().enqueue(job, placement)
        self.in_flight -= 1

    async def finish(self, job_id: str, attempt: int) -> None:
        await self._call("finish")
        await super().finish(job_id, attempt)

    async def look_up(self, jobs: Sequence[tuple[str, int]]) -> list[QueueState]:
        await self._call("look_up")
        return await super().look_up(jobs)

    async def was_called(self, name: str, times: int) -> None:
        """Wait for so many calls."""
        async with asyncio.timeout(60), self.called:
            await self.called.wait_for(lambda: self.calls[name] >= times)


@pytest.fixture
def queue(redis: Redis) -> ShakyQueue:
    return ShakyQueue(redis)


def quick(queue: JobQueue, **times: float) -> Dispatcher:
    """Make a dispatcher that waits for less."""
    return Dispatcher(lambda *_: queue, lambda *_: Placement(), timing=DispatchTiming(pause_s=0.01, **times))


@pytest.fixture
def dispatcher(queue: ShakyQueue) -> Dispatcher:
    return quick(queue)


async def test_the_jobs_of_a_lost_worker_go_on_all_but_a_few_at_a_time(
    dispatcher: Dispatcher, queue: ShakyQueue
) -> None:
    count, link = 300, RecordingLink("w")
    roomy = Capacity(rows=count, rows_limit=count, tokens=10**6, max_tokens=4096, max_rank=64)
    dispatcher.link_up(link, [])
    async with AsyncExitStack() as stack:
        for number in range(count):
            await stack.enter_async_context(dispatched(dispatcher, job(f"j{number}")))
        jobs: list[Job] = []
        while len(jobs) < count:
            jobs += (await queue.claim("sha256:0", roomy)).jobs
        dispatcher.receive_claims(link, [(one.job_id, 1) for one in jobs])
        queue.most_in_flight = 0
        dispatcher.link_down(link)
        again: list[Job] = []
        async with asyncio.timeout(60):
            while len(again) < count:
                again += (await queue.claim("sha256:0", roomy)).jobs
                await queue.wait_for_work(timeout_s=0.05)
        assert {one.job_id: one.attempt for one in again} == {f"j{number}": 2 for number in range(count)}
        assert 1 < queue.most_in_flight <= AT_ONCE


async def test_a_redis_that_is_down_is_asked_again_until_it_has_the_job(
    dispatcher: Dispatcher, queue: ShakyQueue
) -> None:
    async with dispatched(dispatcher, job()):
        await claim(queue)
        queue.faults["enqueue"] = [ConnectionError("down") for _ in range(9)]
        dispatcher.receive_frame(RecordingLink("w"), frame(0, 5, returned=True))
        again = await claim(queue)
        assert (again.attempt, again.emitted) == (2, {0: (5,)})
        assert queue.calls["enqueue"] == 1 + 9 + 1


async def test_a_new_job_waits_for_a_redis_that_fails_over(dispatcher: Dispatcher, queue: ShakyQueue) -> None:
    queue.faults["enqueue"] = [RedisConnectionError("refused") for _ in range(9)]
    async with dispatched(dispatcher, job()):
        assert (await claim(queue)).attempt == 1
        assert queue.calls["enqueue"] == 9 + 1


async def test_a_new_job_does_not_wait_for_long(queue: ShakyQueue) -> None:
    dispatcher = quick(queue, enqueue_s=0.05)
    queue.faults["enqueue"] = [RedisConnectionError("refused") for _ in range(1_000)]
    with pytest.raises(Unavailable) as refused:
        await dispatcher.dispatch(job())
    assert refused.value.reason == "QUEUE_DOWN"
    assert 1 < queue.calls["enqueue"] < 1_000
    assert dispatcher.jobs == ()


@pytest.mark.parametrize("faults", [FAULTS_LIMIT - 1, FAULTS_LIMIT])
async def test_a_fault_that_nobody_expected_strands_no_job(
    dispatcher: Dispatcher, queue: ShakyQueue, faults: int
) -> None:
    async with dispatched(dispatcher, job()) as routed:
        await claim(queue)
        queue.faults["enqueue"] = [RuntimeError("a bug") for _ in range(faults)]
        dispatcher.receive_frame(RecordingLink("w"), frame(0, returned=True))
        if faults < FAULTS_LIMIT:
            assert (await claim(queue)).attempt == 2
            return
        with pytest.raises(Internal) as caught:
            await read(routed)
        assert caught.value.reason == "DISPATCH_FAILED"


async def test_a_fault_of_one_look_does_not_end_the_looks(queue: ShakyQueue) -> None:
    dispatcher = quick(queue, look_s=0.01, claim_grace_s=0.05)
    queue.faults["look_up"] = [RuntimeError("a bug"), ConnectionError("down")]
    watch = asyncio.create_task(dispatcher.redispatch_missing())
    async with dispatched(dispatcher, job()):
        assert (await claim(queue)).attempt == 1  # and its worker dies before it says so
        assert (await claim(queue)).attempt == 2
    assert not queue.faults["look_up"]
    watch.cancel()


async def test_a_job_that_ended_leaves_the_queue_though_redis_was_down_at_that_moment(
    dispatcher: Dispatcher, queue: ShakyQueue
) -> None:
    async with dispatched(dispatcher, job()):
        queue.faults["finish"] = [ConnectionError("down") for _ in range(3)]
    await queue.was_called("finish", 1)
    assert await queue.count_waiting() == 1
    await dispatcher.drain_tasks()
    assert await queue.count_waiting() == 0
    assert queue.calls["finish"] == 4


async def test_the_removal_of_an_ended_job_is_tried_for_a_bounded_time(queue: ShakyQueue) -> None:
    dispatcher = quick(queue, finish_s=0.05)
    async with dispatched(dispatcher, job()):
        queue.faults["finish"] = [ConnectionError("down") for _ in range(10_000)]
    await dispatcher.drain_tasks()
    assert 1 <= queue.calls["finish"] < 10_000


async def test_a_job_that_ends_while_it_is_enqueued_again_is_not_left_in_the_queue(
    dispatcher: Dispatcher, queue: ShakyQueue
) -> None:
    async with dispatched(dispatcher, job()):
        await claim(queue)
        queue.faults["enqueue"] = [ConnectionError("down")]
        dispatcher.receive_frame(RecordingLink("w"), frame(0, returned=True))
        await queue.was_called("enqueue", 2)
    await dispatcher.drain_tasks()
    assert await queue.count_waiting() == 0


async def test_a_choice_that_is_closed_while_its_job_waits_is_not_computed(
    dispatcher: Dispatcher, queue: ShakyQueue
) -> None:
    first, second = RecordingLink("first"), RecordingLink("second")
    async with dispatched(dispatcher, job(n=3)) as routed:
        await claim(queue)
        dispatcher.receive_frame(first, frame(0, 5, returned=True))
        await queue.was_called("enqueue", 2)
        assert routed.link is None
        routed.close_choice(1)  # a stop string in what came last
        again = await claim(queue)
        assert again.done == ()
        dispatcher.receive_claims(second, [("j", 2)])
        assert second.sent == [("cancel", "j", 2, 1)]
        dispatcher.receive_frame(second, frame(1, 6, attempt=2, returned=True))
        assert (await claim(queue)).done == (1,)


async def test_a_job_that_is_given_back_before_its_enqueue_is_answered_goes_on(
    dispatcher: Dispatcher, queue: ShakyQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a worker claim and return the job before the answer of Redis comes."""
    link, enqueue = RecordingLink("w"), JobQueue.enqueue

    async def slow(self: JobQueue, one: Job, *rest: Any) -> None:
        await enqueue(self, one, *rest)
        if one.attempt == 1:
            await claim(self)
            dispatcher.receive_frame(link, frame(0, 5, returned=True))

    monkeypatch.setattr(JobQueue, "enqueue", slow)
    async with dispatched(dispatcher, job()) as routed:
        again = await claim(queue)
        assert (again.attempt, again.emitted) == (2, {0: (5,)})
        dispatcher.receive_frame(link, frame(1, 6, attempt=2, finish=FinishReason.END))
        assert routed.ended


JOB = Job("j", "acme", "tiny", "sha256:0", "here", (1, 2), StoppingParams(100), request_id="j")


def worker(worker_id: str, *, used: int, max_rank: int = 64) -> WorkerState:
    kinds = {"U32": 0, "U63": 0, "str": ""}
    rest: dict[str, Any] = {name: kinds[kind] for name, kind in WorkerState.__annotations__.items() if kind in kinds}
    rest |= {"worker_id": worker_id, "rows_running": used, "rows_limit": 8, "max_rank": max_rank, "max_tokens": 1000}
    return WorkerState(phase=WorkerPhase.SERVING, adapters=(), **rest)


def test_a_job_prefers_able_workers_and_pays_for_its_adapter() -> None:
    states = [worker("busy", used=8), worker("free", used=0), worker("small", used=0, max_rank=8)]
    placer = Placer(lambda *_: states, lambda tenant: 2.0 if tenant == "acme" else 1.0, 10.0)
    adapter = AdapterRef("r", "sha256:a", 16, 3 * MIB)
    assert placer.place(replace(JOB, adapter=adapter), "c") == Placement(2.0, ("free",), 30.0, cell="c")
    assert placer.place(replace(JOB, tenant="other"), "c") == Placement(1.0, cell="c")
    terms = KeyTerms("k1", 2.0, 0.5)
    keyed = Placer(lambda *_: states, lambda tenant: 1.0, 10.0, calling_key_terms=lambda: terms)
    assert keyed.place(JOB, "") == Placement(key=terms)
    assert keyed.place(replace(JOB, attempt=2), "") == Placement(), "no call dispatches later attempts"
    loads = [WorkerLoad(name, 0, 8) for name in ("free", "small", "busy")]
    states[0] = worker("busy", used=0)
    small = replace(JOB, adapter=replace(adapter, rank=8))
    assert placer.place(small, "c").prefer == Roster(loads).preferred("sha256:a").workers


def test_the_router_places_jobs_by_the_plan_of_the_calling_key(tmp_path: Path) -> None:
    (tmp_path / "plans.toml").write_text("[keys.k1]\nweight = 3\nqueue_share = 0.5\n[keys.k2]\ntokens_per_day = 1\n")
    # They are asked for jobs with an adapter.
    models: Any = SimpleNamespace(queue_of=None, serving=None, why_unservable=None, live=SimpleNamespace(homes_of=None))
    settings, metrics = RouterSettings(store="s", redis_url="r"), RouterMetrics()
    plans = plans_in(tmp_path / "plans.toml")
    dispatcher = _dispatcher(settings, models, RelayReach(metrics), plans, metrics, Cells())

    def placed(key: str) -> Placement:
        roles = frozenset({Role.TENANT_USER})
        set_caller(Principal("someone", roles, CredentialKind.API_KEY, "acme", key_id=key))
        return dispatcher._place(JOB, "")

    placement = Placement(queue_share=QUEUE_SHARE)
    assert copy_context().run(placed, "k1") == replace(placement, key=KeyTerms("k1", 3.0, 0.5))
    assert copy_context().run(placed, "k2") == placement
    assert dispatcher._place(JOB, "") == placement
