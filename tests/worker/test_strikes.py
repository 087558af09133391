"""What a worker tells of its jobs when its engine dies, and how a suspect runs: real engine, Valkey and relay."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc
from redis.asyncio import Redis

from broker.keys import Keys
from broker.messages import STRIKES_LIMIT, AdapterRef, Job, StoppingParams
from broker.queue import JobQueue
from rpc.server import Server, relay_options
from telemetry.tracing import Spans
from worker.adapter_disk import DiskTier
from worker.adapter_download import Patience
from worker.adapter_fetch import AdapterFetcher
from worker.chronicle import Chronicle
from worker.held import HeldJobs
from worker.intake import Intake
from worker.link import Configure, Stepped
from worker.metrics import WorkerMetrics
from worker.relay_client import RelayClients
from worker.scheduling.contract import FinishKind, Output
from worker.supervisor import EngineLostError, EngineProcess

KEYS = Keys("hash", "main")
MODEL = "hash:?vocab=600&step_ms=2"
ENDLESS = 20_000
ROWS = 4


def job(job_id: str, address: str = "here", *, max_tokens: int = ENDLESS, strikes: int = 0, n: int = 1) -> Job:
    stopping = StoppingParams(max_tokens=max_tokens)
    one = Job(job_id, "acme", "hash", "sha256:0", address, (1, 2, 3), stopping, seed=1, n=n)
    return replace(one, attempt=1 + strikes, strikes=strikes)


# The rule


def test_a_job_is_new_until_a_step_has_given_it_a_token() -> None:
    held = HeldJobs().add(job("a"))
    (choice,) = held.running
    assert not held.struck  # it is not in the engine
    choice.in_engine = True
    assert held.struck
    choice.record(Output(choice.sequence_id, 0, (7,)), 0.0, 1)
    assert not held.struck


def test_answers_that_join_their_sibling_are_new_again() -> None:
    held = HeldJobs().add(job("a", n=2))
    first, second = held.running
    first.in_engine = True
    first.record(Output(first.sequence_id, 0, (7,)), 0.0, 1)
    second.in_engine = True
    assert held.struck
    second.record(Output(second.sequence_id, 0, (8,), finish=FinishKind.LENGTH), 0.0, 2)
    assert not held.struck


def test_a_continuation_is_new_though_it_has_ids_of_earlier_attempts() -> None:
    held = HeldJobs().add(replace(job("a"), attempt=2, emitted={0: (5, 6)}))
    held.running[0].in_engine = True
    assert held.struck


def test_a_suspect_is_never_cleared_while_it_runs() -> None:
    held = HeldJobs().add(job("a", strikes=STRIKES_LIMIT))
    (choice,) = held.running
    assert not held.struck
    choice.in_engine = True
    choice.record(Output(choice.sequence_id, 0, (7,)), 0.0, 1)
    assert held.struck
    choice.record(Output(choice.sequence_id, 1, (8,), finish=FinishKind.LENGTH), 0.0, 2)
    assert not held.struck


# The worker


class Router(relay_pb2_grpc.RelayServiceServicer):
    """Takes all that a worker sends, and acks what ended."""

    def __init__(self) -> None:
        # Job ids in the order of what was told of them.
        self.events: list[tuple[str, str]] = []
        self.ids: defaultdict[str, list[int]] = defaultdict(list)
        # Whether a job that was given back was struck.
        self.returned: dict[str, bool] = {}
        self._news = asyncio.Condition()

    async def Connect(self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Any) -> Any:
        yield pb.ConnectResponse(welcome=pb.Welcome())
        async for request in request_iterator:
            self.events += [("claimed", one.job_id) for one in (*request.hello.holds, *request.claims.jobs)]
            acks = [ack for ack in map(self._take, request.frames.frames) if ack is not None]
            if acks:
                yield pb.ConnectResponse(acks=pb.Acks(jobs=acks))
            async with self._news:
                self._news.notify_all()

    def _take(self, frame: pb.Frame) -> pb.JobAttempt | None:
        self.ids[frame.job_id] += frame.token_ids
        if frame.finish.kind == pb.FINISH_KIND_UNSPECIFIED:
            return None
        if frame.finish.kind == pb.FINISH_KIND_RETURNED:
            assert frame.job_id not in self.returned
            self.returned[frame.job_id] = frame.finish.struck
        self.events.append(("ended", frame.job_id))
        return pb.JobAttempt(job_id=frame.job_id, attempt=frame.attempt)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what was sent makes this true."""
        async with asyncio.timeout(30), self._news:
            await self._news.wait_for(condition)


class Worker:
    """An intake with its engine, as an incarnation runs them."""

    def __init__(self, engine: EngineProcess, intake: Intake, queue: JobQueue, address: str) -> None:
        self.engine = engine
        self.intake = intake
        self.queue = queue
        self.address = address

    async def listen(self) -> None:
        """Until the engine is lost."""
        try:
            async for message in self.engine.messages():
                if isinstance(message, Stepped):
                    self.intake.stepped(message)
        except EngineLostError:
            self.intake.engine_lost()

    async def until_held(self, job_id: str, condition: Callable[[], bool] = lambda: True) -> None:
        """Wait until a job is here."""
        async with asyncio.timeout(30):
            # An engine that is stopped tells nothing.
            while self.intake.held.get(job_id, 1) is None or not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running(router: Router, redis: Redis, disk: Path) -> AsyncIterator[Worker]:
    """A worker whose store never answers."""
    server = Server(options=relay_options())
    relay_pb2_grpc.add_RelayServiceServicer_to_server(router, server.grpc)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    configure = Configure(MODEL, "cpu", "auto", ROWS, 4096, 16, 4, 0, 64, 512, 1)
    engine = await EngineProcess.start(configure)
    queue = JobQueue(redis, KEYS, worker_id="w")
    with socket.create_server(("127.0.0.1", 0)) as store:
        tier = DiskTier.open(disk, 1 << 30)
        fetcher = AdapterFetcher(f"127.0.0.1:{store.getsockname()[1]}", tier, Patience(300.0, 300.0))
        intake = Intake("sha256:0", engine, queue, fetcher, Chronicle(WorkerMetrics(), Spans(), "w"))
        relay = RelayClients("w", "w-1", intake.held, intake)
        worker = Worker(engine, intake, queue, address)
        intake.use(relay, await engine.ready())
        tasks = [asyncio.create_task(worker.listen()), asyncio.create_task(intake.claim())]
        try:
            yield worker
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await intake.close()
            await relay.close(0.0)
            await engine.stop()
            await fetcher.close()
            await tier.close()
            await server.stop(0)


@pytest.fixture
def router() -> Router:
    return Router()


async def test_a_dead_engine_s_jobs_are_given_back_and_only_the_new_ones_are_struck(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path) as worker:
        await worker.queue.enqueue(job("old", worker.address))
        await router.until(lambda: len(router.ids["old"]) >= 3)
        fetching = replace(job("fetching", worker.address), adapter=AdapterRef("r", "sha256:a", 8, 100))
        await worker.queue.enqueue(fetching)
        await worker.until_held("fetching")
        os.kill(worker.engine.pid, signal.SIGSTOP)  # so that what comes now gets no token
        await worker.queue.enqueue(job("new", worker.address))
        held = worker.intake.held
        await worker.until_held("new", lambda: any(choice.in_engine for choice in held.get("new", 1).running))  # type: ignore[union-attr]
        os.kill(worker.engine.pid, signal.SIGKILL)
        await router.until(lambda: len(router.returned) == 3)
        assert router.returned == {"old": False, "fetching": False, "new": True}
        assert worker.intake.held.running == []
        # What is claimed in the same moment comes back as well.
        await worker.queue.enqueue(job("late", worker.address))
        await router.until(lambda: "late" in router.returned)
        assert router.returned["late"] is False
        assert router.events.index(("claimed", "late")) < router.events.index(("ended", "late"))


async def test_a_suspect_runs_alone(router: Router, redis: Redis, tmp_path: Path) -> None:
    async with running(router, redis, tmp_path) as worker:
        await worker.queue.enqueue(job("before", worker.address, max_tokens=100))
        await router.until(lambda: len(router.ids["before"]) >= 1)
        await worker.queue.enqueue(job("suspect", worker.address, max_tokens=100, strikes=STRIKES_LIMIT))
        await router.until(lambda: ("claimed", "suspect") in router.events)
        await worker.queue.enqueue(job("after", worker.address, max_tokens=10))
        await router.until(lambda: ("ended", "after") in router.events)
        names = ("before", "suspect", "after")
        assert router.events == [(what, name) for name in names for what in ("claimed", "ended")]
        assert len(router.ids["suspect"]) == 100


async def test_a_suspect_that_was_claimed_beside_others_waits_until_they_have_ended(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    """Rows that were lent while an adapter was slow may be all rows."""
    async with running(router, redis, tmp_path) as worker:
        await worker.queue.enqueue(job("before", worker.address, max_tokens=100))
        await router.until(lambda: len(router.ids["before"]) >= 1)
        suspect = job("suspect", worker.address, max_tokens=10, strikes=STRIKES_LIMIT)
        worker.intake._accept([suspect])  # no claim does so but for a moment's chance
        await router.until(lambda: ("ended", "suspect") in router.events)
        assert router.events.index(("ended", "before")) < router.events.index(("ended", "suspect"))
        assert len(router.ids["before"]) == 100


async def test_a_suspect_whose_engine_dies_is_struck_whatever_it_has_got(
    router: Router, redis: Redis, tmp_path: Path
) -> None:
    async with running(router, redis, tmp_path) as worker:
        await worker.queue.enqueue(job("suspect", worker.address, strikes=STRIKES_LIMIT))
        await router.until(lambda: len(router.ids["suspect"]) >= 3)
        os.kill(worker.engine.pid, signal.SIGKILL)
        await router.until(lambda: router.returned == {"suspect": True})
