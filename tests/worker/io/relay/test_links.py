"""A link that fails at any place is opened again, and no id is lost: at a real gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from loraplex.contracts.broker.messages import Job
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc
from loraplex.runtime.rpc.server import Server, relay_options
from loraplex.runtime.tenancy.guard import open_guard
from loraplex.worker.engine_api import Output
from loraplex.worker.io.local_jobs import LocalChoice, LocalJobs
from loraplex.worker.io.relay import frames
from loraplex.worker.io.relay.frames import add_frame
from loraplex.worker.io.relay.links import LinkSettings, RouterLinks
from tests.worker.io.relay.handlers import AckHandler, NoRequests


class Router(relay_pb2_grpc.RelayServiceServicer):
    """A router that counts the ids it has and asks for those that are missing, as the real one does."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.hellos = 0
        self.ended = 0
        self.frames: list[pb.Frame] = []
        # Responses before and after the rewinds that a hello gets.
        self.first: pb.ConnectResponse | None = None
        self.last: pb.ConnectResponse | None = None
        self._news = asyncio.Condition()

    async def Connect(self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Any) -> Any:
        hello = (await anext(request_iterator)).hello
        try:
            yield pb.ConnectResponse(welcome=pb.Welcome())
            await self._tell(hello=True)
            if self.first is not None:
                first, self.first = self.first, None
                yield first
            at = len(self.ids)
            positions = [pb.Position(job_id=one.job_id, attempt=one.attempt, offset=at) for one in hello.holds]
            yield pb.ConnectResponse(rewinds=pb.Rewinds(positions=positions))
            if self.last is not None:
                yield self.last
            async for request in request_iterator:
                for frame in request.frames.frames:
                    self.frames.append(frame)
                    assert frame.offset <= len(self.ids)
                    self.ids += frame.token_ids[len(self.ids) - frame.offset :]
                await self._tell()
        finally:
            self.ended += 1

    async def _tell(self, *, hello: bool = False) -> None:
        async with self._news:
            self.hellos += hello
            self._news.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what it was sent makes the condition true."""
        async with asyncio.timeout(30), self._news:
            await self._news.wait_for(condition)


class FailingHandler(NoRequests):
    """A handler in which an ack fails, as by an error in this worker."""

    def remove(self, job_id: str, attempt: int) -> None:
        raise ValueError("what nobody expected")


class Line:
    """A worker's links, with one job of a router at `address`."""

    def __init__(self, address: str, handler: NoRequests | None = None) -> None:
        self._jobs = LocalJobs()
        self.links = RouterLinks(LinkSettings("w", "w-1"), self._jobs, handler or FailingHandler())
        local = self._jobs.add(
            Job("a", "acme", "tiny", "sha256:0", address, (1,), StoppingParams(100), sampling=SamplingParams(seed=1))
        )
        self.choice: LocalChoice = local.choices[0]
        self.links.claimed(local)

    def make(self, count: int) -> None:
        """Record `count` more ids, as of the engine."""
        at = len(self.choice.ids)
        self.choice.record(Output(self.choice.sequence_id, at, tuple(range(at, at + count)), None))
        self.links.progressed(self.choice)

    def forget(self) -> None:
        """Drop the job: its link ends once it is lost."""
        self._jobs.remove("a", 1)

    async def close(self) -> None:
        self.forget()
        await self.links.close(1)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Router, str]]:
    router, server = Router(), Server(open_guard(), options=relay_options())
    relay_pb2_grpc.add_RelayServiceServicer_to_server(router, server.services)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    try:
        yield router, address
    finally:
        await server.stop(0)


async def test_a_router_that_is_gone_for_good_leaves_no_task_behind(caplog: pytest.LogCaptureFixture) -> None:
    """A task that nobody ends is destroyed one day, and Python logs it."""
    before = asyncio.all_tasks()
    async with serving() as (router, address):
        line = Line(address)
        line.make(5)
        await router.until(lambda: len(router.ids) == 5)
    line.forget()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            while asyncio.all_tasks() - before:  # noqa: ASYNC110 — the link ends by itself
                await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == before
    gc.collect()
    # gRPC's poller logs a BlockingIOError of its own on a busy machine.
    said = [record.getMessage() for record in caplog.records if record.name == "asyncio"]
    assert [message for message in said if "destroyed" in message] == []


async def test_a_link_whose_messages_can_t_be_made_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 0

    def fails_once(choice: LocalChoice, batch: pb.FrameBatch) -> pb.Frame:
        nonlocal failures
        if choice.ids and failures == 0:
            failures += 1
            raise ValueError("what nobody expected")
        return add_frame(choice, batch)

    monkeypatch.setattr(frames, "add_frame", fails_once)
    async with serving() as (router, address):
        line = Line(address)
        line.make(5)
        await router.until(lambda: len(router.ids) == 5)
        assert (failures, router.hellos) == (1, 2)
        line.make(5)
        await router.until(lambda: router.ids == list(range(10)))
        await line.close()


async def test_a_link_whose_messages_can_t_be_obeyed_is_opened_again() -> None:
    async with serving() as (router, address):
        router.first = pb.ConnectResponse(acks=pb.Acks(jobs=[pb.JobAttempt(job_id="a", attempt=1)]))
        line = Line(address)
        await router.until(lambda: router.hellos == 2)
        line.make(5)
        await router.until(lambda: router.ids == list(range(5)))
        await line.close()


async def test_a_rewind_of_a_job_that_was_removed_gives_it_back() -> None:
    """A hello that was under way for long lists jobs that are gone: their router would wait for ever."""
    async with serving() as (router, address):
        gone = pb.Position(job_id="gone", attempt=2, offset=3)
        router.last = pb.ConnectResponse(rewinds=pb.Rewinds(positions=[gone]))
        line = Line(address)
        await router.until(lambda: bool(router.frames))
        frame = router.frames[0]
        assert (frame.job_id, frame.attempt, frame.finish.kind) == ("gone", 2, pb.FINISH_KIND_RETURNED)
        assert not frame.finish.struck
        await line.close()


async def test_a_rewind_of_an_answer_without_ids_sends_nothing() -> None:
    """Answer a fresh link's hello with rewinds to 0, as routers do; an empty frame was taken for the first token."""
    async with serving() as (router, address):
        router.last = pb.ConnectResponse(acks=pb.Acks(jobs=[pb.JobAttempt(job_id="b", attempt=1)]))
        handler = AckHandler()
        line = Line(address, handler)
        async with asyncio.timeout(30):
            await handler.got_ack.wait()
        line.make(5)
        await router.until(lambda: len(router.ids) == 5)
        assert [len(frame.token_ids) for frame in router.frames] == [5]
        assert router.frames[0].HasField("first")
        await line.close()


async def test_a_link_that_was_ended_from_within_leaves_its_place_to_another() -> None:
    async with serving() as (router, address):
        line = Line(address)
        await router.until(lambda: router.hellos == 1)
        link = line.links._links[address]
        link._task.cancel()
        await asyncio.wait({link._task})
        line.make(5)
        await router.until(lambda: router.ids == list(range(5)))
        assert router.hellos == 2
        await line.close()


class Cable:
    """A TCP proxy that can swallow all that goes one way, without an end that either side would notice."""

    def __init__(self, address: str, swallows: str) -> None:
        self._target = address.rsplit(":", 1)
        self._swallows = swallows
        # Set: the connections of now swallow; those that come later do not.
        self.cut = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        whole = self.cut.is_set()
        for name, source, sink in (("up", reader, there_writer), ("down", there_reader, writer)):
            task = asyncio.create_task(self._carry(source, sink, swallows=not whole and name == self._swallows))
            self._tasks.add(task)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, swallows: bool) -> None:
        while data := await source.read(1 << 16):
            if not (swallows and self.cut.is_set()):
                sink.write(data)
        if not (swallows and self.cut.is_set()):  # of a cut line nobody hears the end either
            sink.close()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.mark.parametrize("swallows", ["up", "down"])
async def test_a_link_that_is_cut_in_one_direction_is_noticed_at_both_ends(swallows: str) -> None:
    async with serving() as (router, address):
        cable = Cable(address, swallows)
        line = Line(await cable.start())
        line.make(5)
        await router.until(lambda: len(router.ids) == 5)
        cable.cut.set()
        line.make(5)
        await router.until(lambda: router.ids == list(range(10)) and router.hellos == 2)
        async with asyncio.timeout(30):
            while router.ended < 1:  # noqa: ASYNC110 — grpc's keepalive is the only event there is
                await asyncio.sleep(0.05)
        await line.close()
        await cable.close()


async def test_a_router_that_is_away_for_a_moment_is_found_again() -> None:
    async with serving() as (first, address):
        line = Line(address)
        line.make(5)
        await first.until(lambda: len(first.ids) == 5)
    second, server = Router(), Server(open_guard(), options=relay_options())
    second.ids = list(first.ids)
    relay_pb2_grpc.add_RelayServiceServicer_to_server(second, server.services)
    server.bind(*_host_and_port(address))
    await server.start()
    line.make(5)
    await second.until(lambda: second.ids == list(range(10)))
    await line.close()
    await server.stop(0)


def _host_and_port(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host, int(port)
