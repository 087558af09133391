"""Messages of a worker's link and their moments, at a real gRPC server that records them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from loraplex.contracts.broker.messages import Job
from loraplex.contracts.options import FinishReason, SamplingParams, StoppingParams
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.tenancy.guard import open_guard
from loraplex.worker.engine_api import Output
from loraplex.worker.io.local_jobs import LocalChoice, LocalJobs
from loraplex.worker.io.relay.links import LinkSettings, RouterLinks
from tests.worker.io.relay.handlers import AckHandler

# Seconds: so many that a test which waits for the interval fails by its own timeout.
NEVER_S = 3600.0


class Recorder(relay_pb2_grpc.RelayServiceServicer):
    """A router that takes everything; `frames` are those of each message."""

    def __init__(self) -> None:
        self.frames: list[list[pb.Frame]] = []
        # Responses to the hello; the ack that follows them names no job.
        self.responses: list[pb.ConnectResponse] = []
        self._news = asyncio.Condition()

    async def Connect(self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Any) -> Any:
        yield pb.ConnectResponse(welcome=pb.Welcome())
        for response in self.responses:
            yield response
        async for request in request_iterator:
            if request.HasField("frames"):
                self.frames.append(list(request.frames.frames))
                async with self._news:
                    self._news.notify_all()

    async def messages(self, count: int) -> None:
        """Wait until so many messages with frames have come."""
        async with asyncio.timeout(60), self._news:
            await self._news.wait_for(lambda: len(self.frames) >= count)

    async def received(self, count: int) -> None:
        """Wait until job a has so many ids here."""
        async with asyncio.timeout(60), self._news:
            await self._news.wait_for(lambda: len(self.ids("a")) >= count)

    def ids(self, job_id: str) -> list[int]:
        """Return all ids of a job; asserts that each message begins where the one before ended."""
        got: list[int] = []
        for frame in (frame for frames in self.frames for frame in frames if frame.job_id == job_id):
            assert frame.offset == len(got)
            got += frame.token_ids
        return got


class Line:
    """A worker's link to one router, and its jobs."""

    def __init__(self, recorder: Recorder, address: str, send_interval_s: float) -> None:
        self.router = recorder
        self._address = address
        self._jobs = LocalJobs()
        self.handler = AckHandler()
        self.links = RouterLinks(LinkSettings("w", "w-1", send_interval_s), self._jobs, self.handler)

    async def claim(self, job_id: str) -> LocalChoice:
        """Claim a job of one answer; returns when the router has answered."""
        stopping = StoppingParams(max_tokens=100)
        local = self._jobs.add(
            Job(job_id, "acme", "tiny", "sha256:0", self._address, (1,), stopping, sampling=SamplingParams(seed=1))
        )
        self.links.claimed(local)
        async with asyncio.timeout(60):
            while not self.links.live:
                await self.links.next_change.wait()
        return local.choices[0]

    async def close(self) -> None:
        """End the link after what it still has to send; nobody acks here, so that no job may be left."""
        for local in self._jobs.all():
            self._jobs.remove(local.job.job_id, local.job.attempt)
        await self.links.close(5)

    async def make(self, choice: LocalChoice, count: int, finish: FinishReason | None = None) -> None:
        """Record `count` ids, one a step, with time for the link to send each."""
        for step in range(count):
            at = len(choice.ids)
            ends = finish if step == count - 1 else None
            choice.record(Output(choice.sequence_id, at, (1000 + at,), ends))
            self.links.progressed(choice)
            for _ in range(5):
                await asyncio.sleep(0)


@asynccontextmanager
async def opened(send_interval_s: float) -> AsyncIterator[Line]:
    recorder, server = Recorder(), Server(open_guard())
    relay_pb2_grpc.add_RelayServiceServicer_to_server(recorder, server.services)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    line = Line(recorder, f"127.0.0.1:{port}", send_interval_s)
    try:
        yield line
    finally:
        await line.close()
        await server.stop(0)


async def test_the_first_id_and_the_end_go_at_once_and_the_rest_together() -> None:
    async with opened(NEVER_S) as line:
        choice = await line.claim("a")
        await line.make(choice, 1)
        await line.router.messages(1)
        await line.make(choice, 49)
        assert len(line.router.frames) == 1
        await line.make(choice, 1, FinishReason.LENGTH)
        await line.router.messages(2)
        assert [len(frames[0].token_ids) for frames in line.router.frames] == [1, 50]
        assert line.router.ids("a") == list(range(1000, 1051))
        assert line.router.frames[1][0].finish.kind == pb.FINISH_KIND_LENGTH


async def test_what_waits_goes_with_another_s_first_id() -> None:
    async with opened(NEVER_S) as line:
        first = await line.claim("a")
        await line.make(first, 1)
        await line.router.messages(1)
        await line.make(first, 9)
        second = await line.claim("b")
        await line.make(second, 1)
        await line.router.messages(2)
        assert {frame.job_id: len(frame.token_ids) for frame in line.router.frames[1]} == {"a": 9, "b": 1}


async def test_what_is_not_urgent_goes_when_the_interval_is_over() -> None:
    async with opened(0.01) as line:
        choice = await line.claim("a")
        await line.make(choice, 1)
        await line.router.messages(1)
        for _ in range(3):  # nothing begins and nothing ends: the timer alone sends these
            await line.make(choice, 5)
            await line.router.received(len(choice.ids))
        assert line.router.ids("a") == list(range(1000, 1016))


async def test_closing_sends_what_waits() -> None:
    async with opened(NEVER_S) as line:
        choice = await line.claim("a")
        await line.make(choice, 1)
        await line.router.messages(1)
        await line.make(choice, 20)
        await line.close()
        assert line.router.ids("a") == list(range(1000, 1021))


async def test_without_an_interval_every_step_goes() -> None:
    async with opened(0.0) as line:
        choice = await line.claim("a")
        for turn in range(3):
            await line.make(choice, 1)
            await line.router.messages(turn + 1)
        assert [len(frames[0].token_ids) for frames in line.router.frames] == [1, 1, 1]


async def test_the_router_s_pace_is_kept_from_now_on() -> None:
    async with opened(0.0) as line:
        line.router.responses = [
            pb.ConnectResponse(pace=pb.Pace(interval_ms=round(NEVER_S * 1e3))),
            pb.ConnectResponse(acks=pb.Acks(jobs=[pb.JobAttempt(job_id="another", attempt=1)])),
        ]
        choice = await line.claim("a")
        async with asyncio.timeout(60):
            await line.handler.got_ack.wait()
        await line.make(choice, 1)
        await line.router.messages(1)
        await line.make(choice, 20)
        assert len(line.router.frames) == 1
        await line.make(choice, 1, FinishReason.LENGTH)
        await line.router.messages(2)
        assert [len(frames[0].token_ids) for frames in line.router.frames] == [1, 21]
