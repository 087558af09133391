"""A worker with a real engine, Valkey and relay, whose frames go to a router of the test."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.seals import Seals
from loraplex.contracts.options import SamplingParams, StoppingParams, TokenLogprobs
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc
from loraplex.router.dispatch.links import read_logprobs
from loraplex.runtime.rpc.server import Server, relay_options
from loraplex.runtime.telemetry.tracing import Spans
from loraplex.runtime.tenancy.guard import open_guard
from loraplex.worker.engine_api import EngineConfig
from loraplex.worker.io.adapters.disk import DiskTier
from loraplex.worker.io.adapters.fetch import AdapterFetcher, DownloadTimeouts
from loraplex.worker.io.engine_client import EngineLostError, EngineProcess
from loraplex.worker.io.intake import Intake
from loraplex.worker.io.local_jobs import LocalJobs
from loraplex.worker.io.metrics import WorkerMetrics
from loraplex.worker.io.relay.links import LinkSettings
from loraplex.worker.io.results import JobTelemetry, Results, TokenReports
from loraplex.worker.ipc import Begun, Configure, PromptLogprobsPart, Stepped

KEYS = Keys("hash", "main")
MODEL = "hash:?vocab=600&step_ms=2"
ENDLESS = 20_000
ROWS = 4
LINKS = LinkSettings("w", "w-1")


def job(job_id: str, address: str = "here", *, max_tokens: int = ENDLESS, strikes: int = 0, n: int = 1) -> Job:
    stopping = StoppingParams(max_tokens=max_tokens)
    first = Job(job_id, "acme", "hash", "sha256:0", address, (1, 2, 3), stopping, sampling=SamplingParams(seed=1), n=n)
    return replace(first, attempt=1 + strikes, strikes=strikes)


class Router(relay_pb2_grpc.RelayServiceServicer):
    """Takes all that a worker sends, and acks the jobs that ended."""

    def __init__(self) -> None:
        # Events and their jobs, in order.
        self.events: list[tuple[str, str]] = []
        self.ids: defaultdict[str, list[int]] = defaultdict(list)
        # Log probabilities of prompts.
        self.prompts: dict[str, list[TokenLogprobs]] = {}
        # Jobs that were given back: True where blamed.
        self.returned: dict[str, bool] = {}
        self.news = asyncio.Condition()

    async def Connect(self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Any) -> Any:
        yield pb.ConnectResponse(welcome=pb.Welcome())
        async for request in request_iterator:
            self.events += [("claimed", attempt.job_id) for attempt in (*request.hello.holds, *request.claims.jobs)]
            acks = [ack for ack in map(self._take, request.frames.frames) if ack is not None]
            if acks:
                yield pb.ConnectResponse(acks=pb.Acks(jobs=acks))
            async with self.news:
                self.news.notify_all()

    def _take(self, frame: pb.Frame) -> pb.JobAttempt | None:
        if ("claimed", frame.job_id) not in self.events:  # a first frame tells it as well
            self.events.append(("claimed", frame.job_id))
        self.ids[frame.job_id] += frame.token_ids
        if frame.first.prompt_logprobs:
            self.prompts[frame.job_id] = list(map(read_logprobs, frame.first.prompt_logprobs))
        if frame.finish.kind == pb.FINISH_KIND_UNSPECIFIED:
            return None
        if frame.finish.kind == pb.FINISH_KIND_RETURNED:
            assert frame.job_id not in self.returned
            self.returned[frame.job_id] = frame.finish.struck
        self.events.append(("ended", frame.job_id))
        return pb.JobAttempt(job_id=frame.job_id, attempt=frame.attempt)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what was sent makes the condition true."""
        async with asyncio.timeout(30), self.news:
            await self.news.wait_for(condition)


class Worker:
    """An engine with its intake and results, as an engine session runs them."""

    def __init__(self, engine: EngineProcess, intake: Intake, results: Results, queue: JobQueue, address: str) -> None:
        self.engine = engine
        self.intake = intake
        self.results = results
        self.jobs = results.jobs
        self.queue = queue
        self.address = address

    async def listen(self) -> None:
        """Handle the engine's messages until it is lost."""
        try:
            async for message in self.engine.messages():
                match message:
                    case Stepped():
                        self.results.stepped(message)
                    case Begun():
                        self.results.begun(message)
                    case PromptLogprobsPart():
                        self.results.prompt_read(message)
        except EngineLostError:
            self.results.engine_lost()

    async def until_here(self, job_id: str, condition: Callable[[], bool] = lambda: True) -> None:
        """Wait until a job is here, and the condition is true."""
        async with asyncio.timeout(30):
            # A stopped engine sends nothing that could be waited for.
            while self.jobs.get(job_id, 1) is None or not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def listening(router: Router) -> tuple[Server, str]:
    """Start a router's server; return it and its address."""
    server = Server(open_guard(), options=relay_options())
    relay_pb2_grpc.add_RelayServiceServicer_to_server(router, server.services)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    return server, address


@asynccontextmanager
async def running(
    router: Router,
    redis: Redis,
    disk: Path,
    model: str = MODEL,
    links: LinkSettings = LINKS,
    seals: Seals | None = None,
) -> AsyncIterator[Worker]:
    """Run a worker whose store never answers."""
    server, address = await listening(router)
    config = EngineConfig(model, rows=ROWS, kv_blocks=4096, adapter_slots=4, threads=1)
    engine = await EngineProcess.start(Configure(config))
    queue = JobQueue(redis, KEYS, worker_id="w", seals=seals)
    with socket.create_server(("127.0.0.1", 0)) as store:
        tier = DiskTier.open(disk, 1 << 30)
        fetcher = AdapterFetcher(f"127.0.0.1:{store.getsockname()[1]}", tier, DownloadTimeouts(300.0, 300.0, 300.0))
        jobs, telemetry = LocalJobs(), JobTelemetry(WorkerMetrics(), Spans(), "w")
        usage = TokenReports(jobs, queue)
        results = Results(jobs, engine, await engine.ready(), usage, telemetry, links)
        intake = Intake("sha256:0", queue, engine, fetcher, results, usage, telemetry.metrics)
        worker = Worker(engine, intake, results, queue, address)
        tasks = [asyncio.create_task(worker.listen()), asyncio.create_task(intake.run())]
        try:
            yield worker
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await intake.close()
            await results.close(0.0)
            await engine.stop()
            await fetcher.close()
            await tier.close()
            await server.stop(0)
