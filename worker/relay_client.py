"""The worker's end of the relay: one stream to every router that it works for.

A link that breaks is opened again; its hello says what this worker still holds, and the router's rewinds say from where
to send again, so nothing needs to be kept for a link that is down. After GONE_S without one, its jobs are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import grpc
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc

from rpc.server import CHANNEL_OPTIONS
from worker.held import HeldJob, HeldJobs, Piece, piece_from
from worker.scheduling.contract import Failure, FinishKind

log = logging.getLogger(__name__)

T = TypeVar("T")

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

    def claimed(self, jobs: Iterable[HeldJob]) -> None:
        """Tell the routers whose jobs were just claimed."""
        for address, batch in _by_address((held.job.reply_to, held) for held in jobs).items():
            attempts = [pb.JobAttempt(job_id=h.job.job_id, attempt=h.job.attempt) for h in batch]
            self._to(address).send(pb.ConnectRequest(claims=pb.Claims(jobs=attempts)))

    def frames(self, pieces: Iterable[tuple[str, Piece]]) -> None:
        """Send what a step made, one batch to each router."""
        for address, batch in _by_address(pieces).items():
            self._to(address).send(pb.ConnectRequest(frames=_batch(batch)))

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
        self._outbox: asyncio.Queue[pb.ConnectRequest | None] | None = None
        self._task = asyncio.create_task(self._run())

    def send(self, message: pb.ConnectRequest) -> None:
        """Send, if the link is up; what is lost while it is down the router asks for again."""
        if self._outbox is not None:
            self._outbox.put_nowait(message)

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
        outbox: asyncio.Queue[pb.ConnectRequest | None] = asyncio.Queue()
        reached = False
        call = stub.Connect(self._requests(outbox))
        # What is sent from here on is after the hello, which tells all that came before.
        self._outbox = outbox
        try:
            async for response in call:
                reached = True  # by the welcome
                self._obey(response)
        except grpc.aio.AioRpcError as error:
            log.info("router %s: link lost (%s)", self._address, error.code().name)
        finally:
            self._outbox = None
            call.cancel()
        return reached

    async def _requests(self, outbox: asyncio.Queue[pb.ConnectRequest | None]) -> AsyncIterator[pb.ConnectRequest]:
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        for held in self._held.of_router(self._address):
            hello.holds.add(job_id=held.job.job_id, attempt=held.job.attempt)
        yield pb.ConnectRequest(hello=hello)
        while (message := await outbox.get()) is not None:
            yield message

    def _obey(self, response: pb.ConnectResponse) -> None:
        match response.WhichOneof("message"):
            case "acks":
                for ack in response.acks.positions:
                    self._orders.acked(ack.job_id, ack.attempt)
            case "cancels":
                for job in response.cancels.jobs:
                    self._orders.cancel(job.job_id, job.attempt)
            case "rewinds":
                jobs = [(self._held.get(at.job_id, at.attempt), at.offset) for at in response.rewinds.positions]
                pieces = [piece_from(held, offset) for held, offset in jobs if held is not None]
                self.send(pb.ConnectRequest(frames=_batch(pieces)))

    async def close(self, flush_s: float) -> None:
        """End the stream: the router ends its side once it has read all."""
        if self._outbox is not None:
            self._outbox.put_nowait(None)
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


def _by_address(items: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    grouped: dict[str, list[T]] = {}
    for address, item in items:
        grouped.setdefault(address, []).append(item)
    return grouped


def _batch(pieces: Sequence[Piece]) -> pb.FrameBatch:
    return pb.FrameBatch(frames=[_frame(piece) for piece in pieces])


def _frame(piece: Piece) -> pb.Frame:
    frame = pb.Frame(job_id=piece.job_id, attempt=piece.attempt, offset=piece.offset, token_ids=piece.token_ids)
    if piece.adapter_ms is not None:
        frame.first.adapter_ms = piece.adapter_ms
        frame.first.cached_tokens = piece.cached_tokens or 0
    if piece.ending is None:
        return frame
    if piece.ending.kind is not None:
        frame.finish.kind = _KINDS[piece.ending.kind]
    elif piece.ending.failure is not None:
        frame.finish.kind = pb.FINISH_KIND_FAILED
        frame.finish.failure.CopyFrom(_failure(piece.ending.failure))
    else:
        frame.finish.kind = pb.FINISH_KIND_RETURNED
    return frame


def _failure(failure: Failure) -> pb.Failure:
    return pb.Failure(code=_CODES[failure.code], reason=failure.reason, message=failure.message, field=failure.field)
