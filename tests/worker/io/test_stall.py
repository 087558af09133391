"""A worker whose engine stands still gives its jobs back, and goes on when that was all: real engine and relay."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import STRIKES_LIMIT, AdapterTiers, WorkerPhase, WorkerState
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.rpc.tasks import every
from loraplex.worker.io.app import watch_steps
from loraplex.worker.io.membership import Presence, worker_state
from tests.worker.io.relayed_worker import KEYS, MODEL, Router, Worker, job, running

STALL_S = 2.0


@pytest.fixture
def router() -> Router:
    return Router()


@asynccontextmanager
async def watched(worker: Worker, redis: Redis, peers: int = 0) -> AsyncIterator[Presence]:
    """Watch the steps of a worker's engine, which is never replaced; `peers` other workers live."""

    def state(phase: WorkerPhase) -> WorkerState:
        base, results = read_base_model(MODEL), worker.results
        return worker_state("w", "w-1", phase, base, worker.engine.pid, results.limits, results.stats, AdapterTiers())

    health = Server()
    health.bind("127.0.0.1", 0)
    await health.start()
    presence = Presence("w-1", Liveness(redis, KEYS), health, state, worker.results.links.follow)
    await presence.announce()
    own = state(WorkerPhase.SERVING)
    others = [replace(own, worker_id=f"peer-{number}", incarnation=f"peer-{number}") for number in range(peers)]
    tasks = [
        *(asyncio.create_task(every(0.5, partial(Liveness(redis, KEYS).beat, other))) for other in others),
        asyncio.create_task(presence.beat()),
        asyncio.create_task(watch_steps(worker.engine, presence, worker.results, worker.intake, STALL_S, 60.0)),
    ]
    try:
        yield presence
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await health.stop(0)


async def test_a_stalled_engine_s_jobs_are_given_back_at_once_and_only_the_new_ones_are_blamed(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path) as worker, watched(worker, redis, peers=1) as presence:
        await worker.queue.enqueue(job("old", worker.address))
        await router.until(lambda: len(router.ids["old"]) >= 3)
        os.kill(worker.engine.pid, signal.SIGSTOP)
        await worker.queue.enqueue(job("new", worker.address))
        await router.until(lambda: len(router.returned) == 2)
        assert router.returned == {"old": False, "new": True}
        assert presence.withdrawn
        worker.intake.accept(job("late", worker.address))  # as a claim that was under way
        await router.until(lambda: len(router.returned) == 3)
        assert router.returned["late"] is False
        os.kill(worker.engine.pid, signal.SIGCONT)
        async with asyncio.timeout(30):
            while presence.withdrawn:  # noqa: ASYNC110 - the end of a stall has no event
                await asyncio.sleep(0.05)
        await worker.queue.enqueue(job("after", worker.address, max_tokens=10))
        await router.until(lambda: ("ended", "after") in router.events)
        assert len(router.ids["after"]) == 10
        assert not presence.withdrawn
        assert worker.results.stats.blocks_referenced == 0


async def test_a_stalled_engine_keeps_the_jobs_that_no_other_worker_takes(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path) as worker, watched(worker, redis) as presence:
        await worker.queue.enqueue(job("one", worker.address, max_tokens=500))
        await router.until(lambda: len(router.ids["one"]) >= 3)
        os.kill(worker.engine.pid, signal.SIGSTOP)
        async with asyncio.timeout(30):
            while not worker.engine.stalled:  # noqa: ASYNC110 - silence has no event
                await asyncio.sleep(0.05)
        await worker.intake.end_wait()  # a claim that is under way gives back what it gets
        await worker.queue.enqueue(job("late", worker.address, max_tokens=10))
        assert not presence.withdrawn, "calls are still to wait for this worker"
        assert await presence.peers() == []
        os.kill(worker.engine.pid, signal.SIGCONT)
        await router.until(lambda: {("ended", "one"), ("ended", "late")} <= {*router.events})
        assert len(router.ids["one"]) == 500
        assert router.returned == {}


async def test_a_suspect_s_engine_may_stand_still_for_longer(router: Router, redis: Redis, tmp_path: Path) -> None:
    async with running(router, redis, tmp_path) as worker, watched(worker, redis) as presence:
        await worker.queue.enqueue(job("suspect", worker.address, max_tokens=500, strikes=STRIKES_LIMIT))
        await router.until(lambda: len(router.ids["suspect"]) >= 3)
        os.kill(worker.engine.pid, signal.SIGSTOP)
        async with asyncio.timeout(30):
            while worker.engine.silent_s() < 2 * STALL_S:  # noqa: ASYNC110 - silence has no event
                await asyncio.sleep(0.05)
        assert not presence.withdrawn
        os.kill(worker.engine.pid, signal.SIGCONT)
        await router.until(lambda: ("ended", "suspect") in router.events)
        assert router.returned == {}
        assert len(router.ids["suspect"]) == 500


async def test_an_engine_that_compiles_may_stand_still_for_longer(router: Router, redis: Redis, tmp_path: Path) -> None:
    async with running(router, redis, tmp_path) as worker, watched(worker, redis) as presence:
        await worker.queue.enqueue(job("one", worker.address, max_tokens=500))
        await router.until(lambda: len(router.ids["one"]) >= 3)
        os.kill(worker.engine.pid, signal.SIGSTOP)
        worker.engine.compiling = True
        async with asyncio.timeout(30):
            while worker.engine.silent_s() < 2 * STALL_S:  # noqa: ASYNC110 - silence has no event
                await asyncio.sleep(0.05)
        assert not presence.withdrawn
        os.kill(worker.engine.pid, signal.SIGCONT)
        await router.until(lambda: ("ended", "one") in router.events)
        assert router.returned == {}
        assert not worker.engine.compiling, "it has stepped since"


async def test_more_work_does_not_make_a_silent_engine_live(router: Router, redis: Redis, tmp_path: Path) -> None:
    async with running(router, redis, tmp_path) as worker:
        os.kill(worker.engine.pid, signal.SIGSTOP)
        worker.engine.expect()
        silent_s = worker.engine.silent_s()
        for _ in range(3):
            await asyncio.sleep(0.01)
            worker.engine.expect()
            assert worker.engine.silent_s() > silent_s
            silent_s = worker.engine.silent_s()
        os.kill(worker.engine.pid, signal.SIGCONT)
