"""Jobs that no live worker can take end with a status, once that has lasted; those that a worker has go on."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from broker.messages import Job
from broker.queue import JobQueue
from broker.terms import Placement
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.worker_links import DispatchTiming
from router.metrics import RouterMetrics
from rpc.errors import CallError, Unavailable
from tests.router.recording_link import KEYS, RecordingLink, claim, dispatched, frame, job, read

TOO_LARGE = Unavailable("no live worker takes it", reason="NO_WORKER_FITS")


def dispatcher_of(queue: JobQueue, errors: dict[str, CallError], grace_s: float) -> Dispatcher:
    def why_unservable(job: Job) -> CallError | None:
        return errors.get(job.job_id)

    timing = DispatchTiming(unservable_grace_s=grace_s)
    return Dispatcher(lambda _: queue, lambda _: Placement(), RouterMetrics(), timing, why_unservable=why_unservable)


async def test_what_nobody_can_take_ends_and_leaves_the_queue(redis: Redis) -> None:
    queue, errors = JobQueue(redis, KEYS), dict[str, CallError]()
    dispatcher = dispatcher_of(queue, errors, grace_s=0.0)
    async with dispatched(dispatcher, job("large")) as large, dispatched(dispatcher, job("small")) as small:
        dispatcher.update_live_workers({"w"})
        assert not large.ended
        errors["large"] = TOO_LARGE
        dispatcher.update_live_workers({"w"})
        with pytest.raises(Unavailable, match="no live worker takes it"):
            await read(large)
        assert not small.ended
    await dispatcher.drain_tasks()
    assert await queue.count_waiting() == 0


async def test_a_job_that_waits_for_long_is_sealed_anew_again_and_again(redis: Redis) -> None:
    """Else workers refuse it, and report an attack."""
    renewed, placement = asyncio.Queue[tuple[str, Placement]](), Placement(weight=2.0)

    class Recording(JobQueue):
        async def renew(self, job: Job, placement: Placement) -> None:
            renewed.put_nowait((job.job_id, placement))

    queue, timing = Recording(redis, KEYS), DispatchTiming(look_s=0.01, seal_s=0.03)
    dispatcher = Dispatcher(lambda _: queue, lambda _: placement, timing=timing)
    watch = asyncio.create_task(dispatcher.redispatch_missing())
    async with dispatched(dispatcher, job()), asyncio.timeout(20):
        assert [await renewed.get() for _ in range(2)] == [("j", placement)] * 2
    watch.cancel()


async def test_a_worker_that_restarts_has_a_moment_to_come_back(redis: Redis) -> None:
    dispatcher = dispatcher_of(JobQueue(redis, KEYS), {"j": TOO_LARGE}, grace_s=1e9)
    async with dispatched(dispatcher, job()) as routed:
        for _ in range(3):
            dispatcher.update_live_workers(set())
        assert not routed.ended


async def test_a_running_job_goes_on_until_its_worker_gives_it_back(redis: Redis) -> None:
    queue = JobQueue(redis, KEYS)
    dispatcher, link = dispatcher_of(queue, {"j": TOO_LARGE}, grace_s=0.0), RecordingLink("w")
    async with dispatched(dispatcher, job()) as routed:
        await claim(queue)
        dispatcher.receive_frame(link, frame(0, 5))
        dispatcher.update_live_workers({"w"})
        assert not routed.ended
        dispatcher.receive_frame(link, frame(1, returned=True))
        dispatcher.update_live_workers(set())
        assert routed.failure is TOO_LARGE
    await dispatcher.drain_tasks()
    assert await queue.count_waiting() == 0
