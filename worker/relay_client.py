"""The worker's end of the relay: one stream to every router that it works for.

A link sends what its jobs have made since it last could: a slow moment makes fewer, larger messages and queues nothing.
One that breaks is opened again; its hello says what this worker still holds, and the router's rewinds say from where to
send again, so nothing needs to be kept for a link that is down. After GONE_S without one, its jobs are dropped.
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

from rpc.server import CHANNEL_OPTIONS
from worker.held import HeldChoice, HeldJob, HeldJobs
from worker.scheduling.contract import Failure, FinishKind, TokenLogprobs

log = logging.getLogger(__name__)

GONE_S = 5.0
RETRY_S = 0.05

_KINDS = {
    FinishKind.LENGTH: pb.FINISH_KIND_LENGTH,
    FinishKind.END: pb.FINISH_KIND_END,
    FinishKind.STOP_TOKEN: pb.FINISH_KIND_STOP_TOKEN,
}
_CODES = {code.name: code.value[0] for code in grpc.StatusCode}


class Orders(Protocol):
    """What a router's messages ask of the intake."""

    def acked(self, job_id: str, attempt: int) -> None:
        """The router has all of an ended job."""

    def cancel(self, job_id: str, attempt: int) -> None:
        """Stop a job and forget it."""

    def cancel_choice(self, job_id: str, attempt: int, choice: int) -> None:
        """Stop one answer of a job."""

    def router_gone(self, address: str) -> None:
        """A router has been out of reach for GONE_S: drop its jobs."""


class RelayClients:
    """The links of one incarnation, by router address."""

    def __init__(self, worker_id: str, incarnation: str, held: HeldJobs, orders: Orders) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._held = held
        self._orders = orders
        self._links: dict[str, _Link] = {}

    def claimed(self, held: HeldJob) -> None:
        """Tell the job's router who has it."""
        self._to(held.job.reply_to).claimed(held)

    def progressed(self, choice: HeldChoice) -> None:
        """An answer has got ids, or ended."""
        self._to(choice.job.reply_to).progressed(choice)

    def _to(self, address: str) -> _Link:
        link = self._links.get(address)
        if link is None:
            hello = pb.Hello(worker_id=self._worker_id, incarnation=self._incarnation)
            link = self._links[address] = _Link(address, hello, self._held, self._orders, self._forget)
        return link

    def _forget(self, address: str) -> None:
        self._links.pop(address, None)

    async def close(self, flush_s: float) -> None:
        """End every link, after what was still to be sent."""
        links = list(self._links.values())
        await asyncio.gather(*(link.close(flush_s) for link in links))


class _Link:
    """The stream to one router, opened again while there is something to send."""

    def __init__(
        self, address: str, hello: pb.Hello, held: HeldJobs, orders: Orders, forget: Callable[[str], None]
    ) -> None:
        self._address = address
        self._hello = hello
        self._held = held
        self._orders = orders
        self._forget = forget
        # What the next messages tell; a link that is down has nothing to remember.
        self._claims: list[HeldJob] = []
        self._progress: dict[str, HeldChoice] = {}
        self._changed = asyncio.Event()
        self._closing = False
        self._stream = object()
        self._task = asyncio.create_task(self._run())

    def claimed(self, held: HeldJob) -> None:
        """See RelayClients."""
        self._claims.append(held)
        self._changed.set()

    def progressed(self, choice: HeldChoice) -> None:
        """See RelayClients."""
        self._progress[choice.sequence_id] = choice
        self._changed.set()

    async def _run(self) -> None:
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
            self._forget(self._address)
            if holds:
                log.warning("router %s is out of reach; %d jobs are dropped", self._address, len(holds))
                self._orders.router_gone(self._address)

    async def _serve(self, stub: relay_pb2_grpc.RelayServiceAsyncStub) -> bool:
        """One stream, until it ends; whether the router was reached."""
        reached = False
        call = stub.Connect(self._requests())
        try:
            async for response in call:
                reached = True  # by the welcome
                self._obey(response)
        except grpc.aio.AioRpcError as error:
            log.info("router %s: link lost (%s)", self._address, error.code().name)
        finally:
            call.cancel()
        return reached

    async def _requests(self) -> AsyncIterator[pb.ConnectRequest]:
        # A broken call goes on asking its requests for a while: what it took would be lost.
        mine = self._stream = object()
        # The hello tells all that came before it.
        self._claims.clear()
        self._progress.clear()
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        hello.holds.extend(_attempt(held) for held in self._held.of_router(self._address))
        yield pb.ConnectRequest(hello=hello)
        while self._stream is mine:
            if self._claims:
                claims, self._claims = self._claims, []
                yield pb.ConnectRequest(claims=pb.Claims(jobs=[_attempt(held) for held in claims]))
            elif self._progress:
                progress, self._progress = self._progress, {}
                yield pb.ConnectRequest(
                    frames=pb.FrameBatch(frames=[_next_frame(choice) for choice in progress.values()])
                )
            elif self._closing:
                return
            else:
                self._changed.clear()
                await self._changed.wait()
        self._changed.set()  # it may have been meant for the stream that took over

    def _obey(self, response: pb.ConnectResponse) -> None:
        match response.WhichOneof("message"):
            case "acks":
                for ack in response.acks.jobs:
                    self._orders.acked(ack.job_id, ack.attempt)
            case "cancels":
                for job in response.cancels.jobs:
                    if job.HasField("choice"):
                        self._orders.cancel_choice(job.job_id, job.attempt, job.choice)
                    else:
                        self._orders.cancel(job.job_id, job.attempt)
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
        self._changed.set()
        await asyncio.wait({self._task}, timeout=flush_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


# A router that is gone for a moment must be found again soon.
_OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
]


def _attempt(held: HeldJob) -> pb.JobAttempt:
    return pb.JobAttempt(job_id=held.job.job_id, attempt=held.job.attempt)


def _next_frame(held: HeldChoice) -> pb.Frame:
    """What an answer has got since its last frame, and its end if it is there."""
    frame = pb.Frame(
        job_id=held.job.job_id,
        attempt=held.job.attempt,
        choice=held.choice,
        offset=held.start + held.sent,
        token_ids=held.ids[held.sent :],
        logprobs=map(_logprobs, held.logprobs[held.sent :]),
    )
    if held.sent == 0:
        frame.first.adapter_ms = held.adapter_ms
        frame.first.cached_tokens = held.cached_tokens
        frame.first.prompt_logprobs.extend(map(_logprobs, held.prompt_logprobs))
    held.sent = len(held.ids)
    if held.ending is None:
        return frame
    if held.ending.kind is not None:
        frame.finish.kind = _KINDS[held.ending.kind]
    elif held.ending.failure is not None:
        frame.finish.kind = pb.FINISH_KIND_FAILED
        frame.finish.failure.CopyFrom(_failure(held.ending.failure))
    else:
        frame.finish.kind = pb.FINISH_KIND_RETURNED
    return frame


def _logprobs(token: TokenLogprobs) -> pb.TokenLogprobs:
    ids, values = zip(*token.alternatives, strict=True) if token.alternatives else ((), ())
    return pb.TokenLogprobs(logprob=token.logprob, token_ids=ids, logprobs=values)


def _failure(failure: Failure) -> pb.Failure:
    return pb.Failure(code=_CODES[failure.code], reason=failure.reason, message=failure.message, field=failure.field)
