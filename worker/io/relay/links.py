"""The worker's end of the relay: one stream to every router that it works for.

A link sends what its jobs have made since it last could: a slow moment makes fewer, larger messages and queues nothing.
An answer's first ids and its end go at once; the rest is paced where sending takes cores that the engine computes on.
One that breaks is opened again; its hello says what this worker still holds, and the router's rewinds say from where to
send again, so nothing needs to be kept for a link that is down. After GONE_S without one, its jobs are dropped. One
that hears nothing breaks too, within seconds (rpc.server.relay_options).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc

from rpc.server import relay_options
from worker.io.local_jobs.jobs import LocalChoice, LocalJob, LocalJobs
from worker.io.metrics import WorkerMetrics
from worker.io.relay.frames import attempt_of, next_frame
from worker.io.relay.send_throttle import SendThrottle

log = logging.getLogger(__name__)

GONE_S = 5.0
RETRY_S = 0.05


class RelayHandler(Protocol):
    """What a router's messages ask of the intake."""

    def acked(self, job_id: str, attempt: int) -> None:
        """The router has all of an ended job."""

    def cancel(self, job_id: str, attempt: int) -> None:
        """Stop a job and forget it."""

    def cancel_choice(self, job_id: str, attempt: int, choice: int) -> None:
        """Stop one answer of a job."""

    def router_gone(self, address: str) -> None:
        """A router has been out of reach for GONE_S: drop its jobs."""


class RouterLinks:
    """The links of one incarnation, by router address.

    `pace_s`: the least time between two messages to a router that hold neither the beginning nor the end of an answer.
    """

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        held: LocalJobs,
        handler: RelayHandler,
        *,
        pace_s: float = 0.0,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._held = held
        self._handler = handler
        self._pace_s = pace_s
        self._metrics = metrics or WorkerMetrics()
        self._links: dict[str, RouterLink] = {}

    def claimed(self, held: LocalJob) -> None:
        """Tell the job's router who has it."""
        self._to(held.job.reply_to).claimed(held)

    def progressed(self, choice: LocalChoice) -> None:
        """An answer has got ids, or ended."""
        self._to(choice.job.reply_to).progressed(choice)

    def _to(self, address: str) -> RouterLink:
        link = self._links.get(address)
        if link is None:
            hello = pb.Hello(worker_id=self._worker_id, incarnation=self._incarnation)
            throttle = SendThrottle(self._pace_s)
            link = self._links[address] = RouterLink(
                address, hello, self._held, self._handler, throttle, self._forget, self._metrics
            )
        return link

    def _forget(self, address: str, link: RouterLink) -> None:
        if self._links.get(address) is link:
            del self._links[address]

    async def close(self, flush_s: float) -> None:
        """End every link, after what was still to be sent."""
        links = list(self._links.values())
        await asyncio.gather(*(link.close(flush_s) for link in links))


class RouterLink:
    """The stream to one router, opened again while there is something to send."""

    def __init__(
        self,
        address: str,
        hello: pb.Hello,
        held: LocalJobs,
        handler: RelayHandler,
        throttle: SendThrottle,
        forget: Callable[[str, RouterLink], None],
        metrics: WorkerMetrics,
    ) -> None:
        self._address = address
        self._hello = hello
        self._held = held
        self._handler = handler
        self._forget = forget
        self._metrics = metrics
        # What the next messages tell; a link that is down has nothing to remember.
        self._claims: list[LocalJob] = []
        self._progress: dict[str, LocalChoice] = {}
        self._throttle = throttle
        self._closing = False
        # Whether it was we who could not go on with a stream.
        self._failed = False
        self._stream = object()
        self._task = asyncio.create_task(self._run())

    def claimed(self, held: LocalJob) -> None:
        """See RouterLinks."""
        self._claims.append(held)
        self._throttle.want(urgent=True)

    def progressed(self, choice: LocalChoice) -> None:
        """See RouterLinks."""
        self._progress[choice.sequence_id] = choice
        self._throttle.want(urgent=choice.sent == 0 or choice.ending is not None)

    async def _run(self) -> None:
        try:
            await self._keep_up()
        finally:  # whatever ended it: what comes later must open another
            self._throttle.stop()
            self._forget(self._address, self)

    async def _keep_up(self) -> None:
        lost_at = time.monotonic()
        async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            stub = relay_pb2_grpc.RelayServiceStub(channel)
            while True:
                if await self._serve(stub):
                    lost_at = time.monotonic()
                holds = self._held.of_router(self._address)
                if not holds or time.monotonic() - lost_at > GONE_S:
                    break
                await asyncio.sleep(RETRY_S)
            # Before anything is awaited: a job that comes now must open a link of its own.
            self._forget(self._address, self)
            if holds:
                log.warning("router %s is out of reach; %d jobs are dropped", self._address, len(holds))
                self._handler.router_gone(self._address)

    async def _serve(self, stub: relay_pb2_grpc.RelayServiceAsyncStub) -> bool:
        """One stream, until it ends; whether the router was reached, and nothing of ours failed."""
        reached, self._failed = False, False
        call = stub.Connect(self._requests())
        try:
            async for response in call:
                reached = True  # by the welcome
                self._obey(response)
        except grpc.aio.AioRpcError as error:
            log.info("router %s: link lost (%s)", self._address, error.code().name)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The call was cancelled, not we: so it ends when its requests fail.
            log.info("router %s: link lost (cancelled)", self._address)
        except Exception:
            log.exception("router %s: its messages could not be read", self._address)
            self._failed = True
        finally:
            call.cancel()
        return reached and not self._failed

    async def _requests(self) -> AsyncIterator[pb.ConnectRequest]:
        try:
            async for request in self._messages():
                yield request
        except Exception:  # grpc keeps it to itself
            log.exception("router %s: messages to it could not be made", self._address)
            self._failed = True
            raise

    async def _messages(self) -> AsyncIterator[pb.ConnectRequest]:
        # A broken call goes on asking its requests for a while: what it took would be lost.
        mine = self._stream = object()
        # The hello tells all that came before it, but for the jobs that are given back.
        holds = self._held.of_router(self._address)
        self._claims.clear()
        self._progress = {choice.sequence_id: choice for held in holds for choice in held.returned}
        if self._progress:
            self._throttle.due.set()
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        hello.holds.extend(attempt_of(held) for held in holds)
        yield pb.ConnectRequest(hello=hello)
        while self._stream is mine:
            if self._claims:
                claims, self._claims = self._claims, []
                yield pb.ConnectRequest(claims=pb.Claims(jobs=[attempt_of(held) for held in claims]))
            elif self._progress and (self._closing or self._throttle.due.is_set()):
                self._throttle.sent()
                progress, self._progress = self._progress, {}
                self._metrics.messages.inc()
                self._metrics.frames.inc(len(progress))
                yield pb.ConnectRequest(
                    frames=pb.FrameBatch(frames=[next_frame(choice) for choice in progress.values()])
                )
            elif self._closing:
                return
            else:
                self._throttle.due.clear()
                await self._throttle.due.wait()
        self._throttle.due.set()  # it may have been meant for the stream that took over

    def _obey(self, response: pb.ConnectResponse) -> None:
        match response.WhichOneof("message"):
            case "acks":
                for ack in response.acks.jobs:
                    self._handler.acked(ack.job_id, ack.attempt)
            case "cancels":
                for job in response.cancels.jobs:
                    if job.HasField("choice"):
                        self._handler.cancel_choice(job.job_id, job.attempt, job.choice)
                    else:
                        self._handler.cancel(job.job_id, job.attempt)
            case "rewinds":
                for at in response.rewinds.positions:
                    held = self._held.get(at.job_id, at.attempt)
                    choice = held.choices.get(at.choice) if held else None
                    if choice is not None:
                        choice.rewind(at.offset)
                        self.progressed(choice)

    async def close(self, flush_s: float) -> None:
        """End the stream: the router ends its side once it has read all."""
        self._closing = True
        self._throttle.due.set()
        await asyncio.wait({self._task}, timeout=flush_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


# A router that is gone for a moment must be found again soon.
_OPTIONS = [
    *relay_options(),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # This is how long one attempt may take, not how long the next one waits.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 500),
]
