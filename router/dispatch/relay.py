"""The router's end of the relay: one gRPC stream from each worker incarnation; frames come, acks and cancels go."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

import grpc
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.forgets import WorkerForgets
from router.dispatch.pacing import PaceLimits
from router.dispatch.relay_frames import is_long, read_frame
from router.metrics import RouterMetrics
from rpc.errors import InvalidField
from rpc.identity.principal import Principal
from rpc.server import Server

if TYPE_CHECKING:
    from router.dispatch.relay_credentials import RelayCredentials

log = logging.getLogger(__name__)


class WorkerLink:
    """The messages that go to one worker incarnation; see router.dispatch.link.Link."""

    def __init__(self, worker_id: str, incarnation: str, worker: Principal | None = None, peer: str = "") -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        # The holder of the worker's certificate, None without credentials, and its address.
        self.worker, self.peer = worker, peer
        self.heard_at = time.monotonic()
        # Acks, cancels and rewinds for the next message. Any order will do: each ends or rewinds one attempt or choice.
        self._acks: list[pb.JobAttempt] = []
        self._cancels: list[pb.JobAttempt] = []
        self._rewinds: list[pb.Position] = []
        self._forgets: list[pb.Forget] = []
        self._interval_ms: int | None = None
        self._closed = False
        self._due = asyncio.Event()

    def ack(self, job_id: str, attempt: int) -> None:
        """See Link."""
        self._acks.append(pb.JobAttempt(job_id=job_id, attempt=attempt))
        self._due.set()

    def cancel(self, job_id: str, attempt: int, choice: int | None = None) -> None:
        """See Link."""
        self._cancels.append(pb.JobAttempt(job_id=job_id, attempt=attempt, choice=choice))
        self._due.set()

    def rewind(self, job_id: str, attempt: int, choice: int, offset: int) -> None:
        """See Link."""
        self._rewinds.append(pb.Position(job_id=job_id, attempt=attempt, choice=choice, offset=offset))
        self._due.set()

    def pace(self, interval_ms: int) -> None:
        """Give the worker another interval between its messages."""
        self._interval_ms = interval_ms
        self._due.set()

    def forget(self, request: pb.Forget) -> None:
        """Ask the worker to remove what it has of a tenant."""
        self._forgets.append(request)
        self._due.set()

    def close(self) -> None:
        """End the stream."""
        self._closed = True
        self._due.set()

    async def messages(self) -> AsyncIterator[pb.ConnectResponse]:
        """Yield the messages to be sent until the link is closed; each has all of its kind that has come meanwhile."""
        while True:
            await self._due.wait()
            self._due.clear()
            if self._interval_ms is not None:
                interval_ms, self._interval_ms = self._interval_ms, None
                yield pb.ConnectResponse(pace=pb.Pace(interval_ms=interval_ms))
            if self._rewinds:
                positions, self._rewinds = self._rewinds, []
                yield pb.ConnectResponse(rewinds=pb.Rewinds(positions=positions))
            if self._cancels:
                cancels, self._cancels = self._cancels, []
                yield pb.ConnectResponse(cancels=pb.Cancels(jobs=cancels))
            if self._acks:
                acks, self._acks = self._acks, []
                yield pb.ConnectResponse(acks=pb.Acks(jobs=acks))
            while self._forgets:
                yield pb.ConnectResponse(forget=self._forgets.pop(0))
            if self._closed and not self._due.is_set():
                return


class RelayService(relay_pb2_grpc.RelayServiceServicer, relay_pb2_grpc.IdentityServiceServicer):
    """Turns the workers' messages into calls of the dispatcher."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: RouterMetrics | None = None,
        credentials: RelayCredentials | None = None,
        *,
        pace_limits: PaceLimits | None = None,
    ) -> None:
        self.router_id = secrets.token_hex(16)
        self._dispatcher = dispatcher
        self._metrics = metrics or RouterMetrics()
        self._pace_limits = pace_limits or PaceLimits()
        self._credentials = credentials
        self._interval_ms = self._pace_limits.interval_ms(1)
        self._links: set[WorkerLink] = set()
        self.forgets = WorkerForgets(self._links)

    def add_to(self, server: Server) -> None:
        """Serve the relay, and the router's id."""
        relay_pb2_grpc.add_RelayServiceServicer_to_server(self, server.grpc)
        relay_pb2_grpc.add_IdentityServiceServicer_to_server(self, server.grpc)

    def close(self) -> None:
        """End every stream, after the messages that are still to be sent."""
        for link in self._links:
            link.close()

    async def Identify(self, request: pb.IdentifyRequest, context: object) -> pb.IdentifyResponse:
        """Tell which router answers here."""
        return pb.IdentifyResponse(router_id=self.router_id)

    async def Connect(
        self, request_iterator: AsyncIterator[pb.ConnectRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ConnectResponse]:
        """Serve one worker incarnation until either side ends the stream."""
        hello = await anext(request_iterator, None)
        if hello is None or not hello.HasField("hello"):
            raise InvalidField("hello", "the first message must be a hello")
        credentials, peer, worker, proof = self._credentials, "", None, None
        if credentials is not None:
            peer = context.peer()
            worker, proof = credentials.greet(hello.hello, peer)
        link = WorkerLink(hello.hello.worker_id, hello.hello.incarnation, worker, peer)
        self._dispatcher.link_up(link, self._attempts(link, hello.hello.holds))
        reader = asyncio.create_task(self._read(link, request_iterator))
        self._links.add(link)
        self._links_changed()
        link.pace(self._interval_ms)
        try:
            yield pb.ConnectResponse(welcome=pb.Welcome(proof=proof))
            async for message in link.messages():
                yield message
        finally:
            reader.cancel()
            self._links.discard(link)
            self._links_changed()
            self._dispatcher.link_down(link)

    def _links_changed(self) -> None:
        """Count the links, and tell every worker the interval between its messages where their number changes it."""
        self._metrics.links.set(len(self._links))
        interval_ms = self._pace_limits.interval_ms(len(self._links))
        if interval_ms != self._interval_ms:
            self._interval_ms = interval_ms
            for link in self._links:
                link.pace(interval_ms)

    async def _read(self, link: WorkerLink, requests: AsyncIterator[pb.ConnectRequest]) -> None:
        try:
            async for request in requests:
                if self._credentials is not None and self._credentials.has_expired(link.worker, link.peer):
                    return
                link.heard_at = time.monotonic()
                match request.WhichOneof("message"):
                    case "frames":
                        self._metrics.messages.inc()
                        self._metrics.frames.inc(len(request.frames.frames))
                        for message in request.frames.frames:
                            # Other frames of this worker wait for a long one; the event loop does not.
                            long = is_long(message)
                            frame = await asyncio.to_thread(read_frame, message) if long else read_frame(message)
                            self._check_bound(link, frame.job_id, frame.attempt)
                            self._dispatcher.receive_frame(link, frame)
                    case "claims":
                        self._dispatcher.receive_claims(link, self._attempts(link, request.claims.jobs))
                    case "forgotten":
                        self.forgets.answered(link.incarnation, request.forgotten)
        except grpc.aio.UsageError:  # the stream ended while it was read: so a worker's death looks
            log.info("worker %s: its relay stream broke", link.worker_id)
        finally:
            link.close()

    def _attempts(self, link: WorkerLink, jobs: Iterable[pb.JobAttempt]) -> list[tuple[str, int]]:
        """Return the attempts that a message is about; report those which another worker's certificate has."""
        attempts = [(job.job_id, job.attempt) for job in jobs]
        for job_id, attempt in attempts:
            self._check_bound(link, job_id, attempt)
        return attempts

    def _check_bound(self, link: WorkerLink, job_id: str, attempt: int) -> None:
        """Report a worker that sends something of an attempt which another worker's certificate has."""
        if self._credentials is None:
            return
        incarnation = self._dispatcher.bound_to(job_id, attempt)
        if incarnation and incarnation != link.incarnation:
            self._credentials.check_bound(link.worker, link.peer, job_id, incarnation)
