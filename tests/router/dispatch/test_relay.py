"""Both real ends of the relay, with a proxy between them that cuts the link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.messages import Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import Placement
from loraplex.contracts.options import FinishReason, SamplingParams, StoppingParams
from loraplex.relay.v1 import relay_pb2, relay_pb2_grpc
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.router.app import RelayAccess
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import DispatchTiming, WorkerLink
from loraplex.router.dispatch.relay import PaceLimits, RelayService, WorkerForgets
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.metrics import RouterMetrics
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.tenancy.guard import open_guard
from loraplex.worker.engine_api import Output
from loraplex.worker.io.local_jobs import LocalChoice, LocalJobs
from loraplex.worker.io.relay.links import LinkSettings, RouterLinks
from tests.router.recording_link import dispatched


class Proxy:
    """Passes TCP on to a port; `cut` ends every connection, and new ones are refused until `heal`."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._refuses = False

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        self._refuses = True
        for writer in self._writers:
            writer.transport.abort()

    def heal(self) -> None:
        self._refuses = False

    async def stop(self) -> None:
        self.cut()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, other_writer}
        try:
            await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))
        except asyncio.CancelledError:  # the test has ended
            pass
        finally:
            for end in (writer, other_writer):
                end.transport.abort()
                self._writers.discard(end)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


class Handler:
    """A worker that removes a job when the router acks or cancels it."""

    def __init__(self, jobs: LocalJobs) -> None:
        self._jobs = jobs
        self.freed = asyncio.Event()

    def remove(self, job_id: str, attempt: int) -> None:
        self._jobs.remove(job_id, attempt)
        self.freed.set()

    def cancel_choice(self, job_id: str, attempt: int, choice: int) -> None:
        raise AssertionError("one choice has no siblings")

    def router_gone(self, address: str) -> None:
        raise AssertionError("the router was back in time")


@asynccontextmanager
async def router_with_proxy(redis: Redis) -> AsyncIterator[tuple[Dispatcher, Proxy, str]]:
    queue = JobQueue(redis, Keys("tiny", "main"))
    # A slow machine must not make it another attempt.
    timing = DispatchTiming(link_grace_s=3.0)
    dispatcher, server = Dispatcher(lambda *_: queue, lambda *_: Placement(), timing=timing), Server(open_guard())
    service = RelayService(dispatcher)
    relay_pb2_grpc.add_RelayServiceServicer_to_server(service, server.services)
    proxy = Proxy(server.bind("127.0.0.1", 0))
    await server.start()
    address = await proxy.start()
    yield dispatcher, proxy, address
    service.close()
    await server.stop(1)
    await proxy.stop()
    await dispatcher.drain_tasks()


def make(choice: LocalChoice, count: int, links: RouterLinks, *, finish: FinishReason | None = None) -> None:
    """Record `count` more ids, as of the engine."""
    at = len(choice.ids)
    choice.record(Output(choice.sequence_id, at, tuple(range(1000 + at, 1000 + at + count)), finish))
    links.progressed(choice)


async def read(routed: RoutedJob, count: int) -> None:
    """Wait until the router has `count` ids."""
    async with asyncio.timeout(60):
        while routed.emitted_tokens < count:
            await routed.arrivals(routed.reader)


@pytest.mark.parametrize("ends_while_cut", [True, False])
async def test_a_link_that_breaks_and_comes_back_loses_and_repeats_nothing(redis: Redis, ends_while_cut: bool) -> None:
    async with router_with_proxy(redis) as (dispatcher, proxy, address):
        job = Job(
            "j",
            "acme",
            "tiny",
            "sha256:0",
            address,
            (1, 2),
            StoppingParams(max_tokens=100),
            sampling=SamplingParams(seed=1),
        )
        jobs = LocalJobs()
        handler = Handler(jobs)
        links = RouterLinks(LinkSettings("w", "w-1"), jobs, handler)
        async with dispatched(dispatcher, job) as routed:
            local = jobs.add(job)
            choice = local.choices[0]
            links.claimed(local)
            for _ in range(20):
                make(choice, 1, links)
                await asyncio.sleep(0)
            await read(routed, 20)
            for _ in range(3):  # each time what was sent last may be lost with the link
                make(choice, 5, links)
                await asyncio.sleep(0)
                proxy.cut()
                make(choice, 5, links)
                proxy.heal()
                await read(routed, len(choice.ids))
            if ends_while_cut:
                proxy.cut()
            make(choice, 50, links, finish=FinishReason.LENGTH)
            await asyncio.sleep(0)
            proxy.heal()
            async with asyncio.timeout(60):
                await handler.freed.wait()
            assert routed.choices[0].emitted == list(range(1000, 1100))
            assert routed.job.attempt == 1
        await links.close(1)


async def test_a_router_that_stops_ends_the_streams_of_its_workers(redis: Redis) -> None:
    relay, queue = RelayAccess(None, lambda *_: None), JobQueue(redis, Keys("tiny", "main"))
    relay.service(Dispatcher(lambda *_: queue, lambda *_: Placement()), RouterMetrics())
    port = relay.bind("127.0.0.1", 0)
    await relay.server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(60):
        call = relay_pb2_grpc.RelayServiceStub(channel).Connect()
        await call.write(relay_pb2.ConnectRequest(hello=relay_pb2.Hello(worker_id="w", incarnation="i")))
        welcome = await call.read()
        assert isinstance(welcome, relay_pb2.ConnectResponse)
        assert welcome.HasField("welcome")
        await relay.stop(600.0)
        while await call.read() is not grpc.aio.EOF:  # messages that were still to be sent
            pass
        assert await call.code() is grpc.StatusCode.OK


class RecordingLink(WorkerLink):
    """A link that keeps the questions that are sent."""

    def __init__(self, incarnation: str) -> None:
        super().__init__("w", incarnation)
        self.sent: list[pb.Forget] = []

    def forget(self, request: pb.Forget) -> None:
        self.sent.append(request)


async def test_an_answer_counts_only_from_the_worker_that_was_asked() -> None:
    links = [RecordingLink("a"), RecordingLink("b")]
    forgets = WorkerForgets(links)
    asked = asyncio.create_task(forgets.ask("a", "acme"))
    await asyncio.sleep(0)
    assert [(one.tenant, one.number) for one in links[0].sent] == [("acme", 1)]
    forgets.answered("b", pb.Forgotten(number=1, error="of another"))
    forgets.answered("a", pb.Forgotten(number=2, error="of another question"))
    forgets.answered("a", pb.Forgotten(number=1, removals=[pb.Removal(place="jobs", left=2)]))
    assert [one.left for one in (await asked).removals] == [2]


async def test_a_worker_without_a_link_or_an_answer_is_an_error() -> None:
    forgets = WorkerForgets([RecordingLink("a")], answer_s=0.01)
    assert "no link" in (await forgets.ask("gone", "acme")).error
    assert "no answer" in (await forgets.ask("a", "acme")).error


def test_the_interval_grows_with_the_links_between_its_bounds() -> None:
    limits = PaceLimits(messages_per_s=4000, shortest_ms=10, longest_ms=50)
    assert [limits.interval_ms(links) for links in (0, 1, 40, 41, 80, 81, 200, 201, 5000)] == [
        *(10, 10, 10),
        *(20, 20, 30),
        *(50, 50, 50),
    ]
    for links in range(1, 201):
        assert links * 1000 / limits.interval_ms(links) <= limits.messages_per_s


class Worker:
    """A worker's end of a stream, which collects the intervals."""

    def __init__(self, stub: relay_pb2_grpc.RelayServiceAsyncStub, name: str) -> None:
        self._gone = asyncio.Event()
        self._call = stub.Connect(self._requests(name))

    async def _requests(self, name: str) -> AsyncIterator[pb.ConnectRequest]:
        yield pb.ConnectRequest(hello=pb.Hello(worker_id=name, incarnation=name))
        await self._gone.wait()

    async def interval_ms(self) -> int:
        """Return the next interval."""
        async with asyncio.timeout(60):
            async for response in self._call:
                if response.HasField("pace"):
                    return response.pace.interval_ms
        raise AssertionError("the stream has ended")

    async def leave(self) -> None:
        self._gone.set()
        async for _ in self._call:
            pass


@asynccontextmanager
async def served(dispatcher: Dispatcher, limits: PaceLimits) -> AsyncIterator[relay_pb2_grpc.RelayServiceAsyncStub]:
    server, service = Server(open_guard()), RelayService(dispatcher, pace_limits=limits)
    service.add_to(server)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield relay_pb2_grpc.RelayServiceStub(channel)
    finally:
        service.close()
        await server.stop(0)


async def test_every_worker_learns_of_another_interval(dispatcher: Dispatcher) -> None:
    async with served(dispatcher, PaceLimits(messages_per_s=100, shortest_ms=10, longest_ms=20)) as stub:
        first = Worker(stub, "a")
        assert await first.interval_ms() == 10
        second = Worker(stub, "b")
        assert [await second.interval_ms(), await first.interval_ms()] == [20, 20]
        third = Worker(stub, "c")
        assert await third.interval_ms() == 20
        for worker in (third, second):
            await worker.leave()
        assert await first.interval_ms() == 10
        await first.leave()
