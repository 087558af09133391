"""The router's end of the relay: one gRPC stream from each worker incarnation; frames come, acks and cancels go.

At the start the router calls the address that workers are told: it must lead to this relay.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any, Protocol

import grpc

from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import WorkerLink, read_frame
from loraplex.router.metrics import RouterMetrics
from loraplex.runtime.interpreter import StartError
from loraplex.runtime.rpc.errors import CallError, InvalidField, PermissionDenied
from loraplex.runtime.rpc.principal import Principal, Role, Unauthenticated, caller
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.rpc.tls import LiveChannel, TlsFiles
from loraplex.runtime.tenancy.certificates import belongs
from loraplex.runtime.tenancy.guard import Refused

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PaceLimits:
    """The bounds of the interval in which each worker may send to this router, by how many are linked to it.

    A message costs a router the same with one token as with many. Every worker with a job of this router sends to it
    after each of its steps, so that the messages would grow with workers and with the speed of their engines. The
    router gives all workers one interval instead: the first ids and the end of an answer are sent at once, other ids
    wait for its end.

    `messages_per_s`: paced messages a second from all workers together, which decide the interval between the bounds;
    at 60 us each they take a router a quarter of a core. `shortest_ms` and `longest_ms`: minimum and maximum of the
    interval in ms, and so of the time that an id waits. Nobody sees 20 ms, and an engine that makes a token in 5 ms
    then would spend as much on messages; 50 ms are 20 messages a second, of which a reader sees a flow.
    """

    messages_per_s: int = 4000
    shortest_ms: int = 20
    longest_ms: int = 50

    def interval_ms(self, links: int) -> int:
        """Return the interval for this many linked workers, in steps of `shortest_ms`: few changes are to be told."""
        steps = -(-links * 1000 // (self.messages_per_s * self.shortest_ms))
        return min(self.longest_ms, max(1, steps) * self.shortest_ms)


# Timeout in seconds for a worker's answer: it asks the store and its engine.
FORGET_S = 6.0


class WorkerForgets:
    """Questions of one router to its workers: remove what you have of a tenant.

    Each is answered over the link that it went out on.
    """

    def __init__(self, links: Collection[WorkerLink], answer_s: float = FORGET_S) -> None:
        self.links = links
        self._answer_s = answer_s
        self._numbers = count(1)
        # By the worker's incarnation and the question's number.
        self._asked: dict[tuple[str, int], asyncio.Future[pb.Forgotten]] = {}

    async def ask(self, incarnation: str, tenant: str) -> pb.Forgotten:
        """Return a worker's answer; one with an error where it gives none."""
        link = next((one for one in self.links if one.incarnation == incarnation), None)
        if link is None:
            return pb.Forgotten(error="it has no link to this router")
        number = next(self._numbers)
        answer: asyncio.Future[pb.Forgotten] = asyncio.get_running_loop().create_future()
        self._asked[incarnation, number] = answer
        link.forget(pb.Forget(number=number, tenant=tenant))
        try:
            async with asyncio.timeout(self._answer_s):
                return await answer
        except TimeoutError:
            return pb.Forgotten(error=f"no answer within {self._answer_s:g} s")
        finally:
            del self._asked[incarnation, number]

    def answered(self, incarnation: str, answer: pb.Forgotten) -> None:
        """Deliver a worker's answer to its waiter; drop it if there is none."""
        asked = self._asked.get((incarnation, answer.number))
        if asked is not None and not asked.done():
            asked.set_result(answer)


CONNECT = "/loraplex.relay.v1.RelayService/Connect"
# Minimum bytes of a hello's nonce.
NONCE_BYTES = 16


class RelayCredentials:
    """Checks workers' hellos against their certificates; `refused` is told of every refusal, as the guard's is."""

    def __init__(self, tls: TlsFiles, refused: Refused) -> None:
        from loraplex.runtime.tenancy.signatures import Signer, welcome_parts

        self._signer, self._welcome_parts = Signer(tls, Role.ROUTER), welcome_parts
        self._refused = refused

    def greet(self, hello: pb.Hello, peer: str) -> tuple[Principal, pb.RouterProof]:
        """Return who says hello, and the router's proof. Raises PermissionDenied where the hello names another one."""
        worker = caller()
        owner = worker.name.partition("/")[2]
        for named in (hello.worker_id, hello.incarnation):
            if not belongs(owner, named):
                error = PermissionDenied(f"{worker.name} says hello as {named}", reason="OTHER_WORKER")
                self.refuse(worker, error, peer)
                raise error
        if len(hello.nonce) < NONCE_BYTES:
            error = PermissionDenied("the hello has no nonce: the worker runs without credentials", "NONCE_MISSING")
            self.refuse(worker, error, peer)
            raise error
        signature = self._signer.sign(*self._welcome_parts(hello.nonce, owner))
        return worker, pb.RouterProof(certificates=signature.certificates, signature=signature.value)

    def has_expired(self, worker: Principal | None, peer: str) -> bool:
        """Tell, and report, whether the certificate has expired that a worker's stream began with."""
        if worker is None or worker.expires_at is None or time.time() < worker.expires_at:
            return False
        message = f"the certificate of {worker.name} has expired"
        self.refuse(worker, Unauthenticated(message, reason="CREDENTIAL_EXPIRED"), peer)
        return True

    def check_bound(self, worker: Principal | None, peer: str, job_id: str, incarnation: str) -> None:
        """Report a worker that sends something of a job which another worker's incarnation has."""
        if worker is not None and not belongs(worker.name.partition("/")[2], incarnation):
            message = f"{worker.name} sends something of job {job_id}, which {incarnation} has"
            self.refuse(worker, PermissionDenied(message, "OTHER_WORKERS_JOB"), peer)

    def refuse(self, worker: Principal, error: CallError, peer: str) -> None:
        """Report what a worker was not permitted."""
        log.warning("relay: %s", error.message)
        self._refused(CONNECT, worker, error, peer)


class BlockFollower(Protocol):
    """Follows the prefix caches of linked workers, as loraplex.engine_protocols.block_feed does."""

    def up(self, link: WorkerLink) -> None:
        """Follow a worker whose link has come up."""

    def down(self, link: WorkerLink) -> None:
        """Forget the blocks of a worker whose link has broken."""

    def changed(self, link: WorkerLink, changes: pb.BlockChanges) -> None:
        """Take a worker's changes."""

    def stop(self) -> None:
        """End all subscriptions: the router stops."""


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
        self.links: set[WorkerLink] = set()
        self.forgets = WorkerForgets(self.links)
        self.block_feed: BlockFollower | None = None

    def add_to(self, server: Server) -> None:
        """Serve the relay, and the router's id."""
        relay_pb2_grpc.add_RelayServiceServicer_to_server(self, server.services)
        relay_pb2_grpc.add_IdentityServiceServicer_to_server(self, server.services)

    def close(self) -> None:
        """End every stream, after the messages that are still to be sent."""
        for link in self.links:
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
        self.links.add(link)
        self._links_changed()
        link.pace(self._interval_ms)
        if self.block_feed is not None:
            self.block_feed.up(link)
        try:
            yield pb.ConnectResponse(welcome=pb.Welcome(proof=proof))
            async for message in link.messages():
                yield message
        finally:
            reader.cancel()
            self.links.discard(link)
            self._links_changed()
            if self.block_feed is not None:
                self.block_feed.down(link)
            self._dispatcher.link_down(link)

    def _links_changed(self) -> None:
        """Count the links, and tell every worker the interval between its messages where their number changes it."""
        self._metrics.links.set(len(self.links))
        interval_ms = self._pace_limits.interval_ms(len(self.links))
        if interval_ms != self._interval_ms:
            self._interval_ms = interval_ms
            for link in self.links:
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
                            frame = read_frame(message)
                            self._check_bound(link, frame.job_id, frame.attempt)
                            self._dispatcher.receive_frame(link, frame)
                    case "claims":
                        self._dispatcher.receive_claims(link, self._attempts(link, request.claims.jobs))
                    case "forgotten":
                        self.forgets.answered(link.incarnation, request.forgotten)
                    case "block_changes" if self.block_feed is not None:
                        self.block_feed.changed(link, request.block_changes)
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


# Number of attempts before the address counts as wrong, and seconds between them: a name server may be a moment late.
ATTEMPTS = 3
PAUSE_S = 0.5
# Timeout in seconds for the answer of the server at the address.
ANSWER_S = 1.0

_NO_SUCH_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


class AdvertisedAddressError(StartError):
    """An address that leads workers to another server, or nowhere."""


class _Answerer(Enum):
    """Answers of an address; the text completes `--relay-advertise HOST: `."""

    US = ""
    ANOTHER = "another server answers at {}; workers would send this router's answers there"
    NO_NAME = "no such host name"
    NOBODY_HERE = "nothing answers at {}, an address of this machine alone"
    NOBODY = "nothing answers at {} when it is called from here"


async def check_advertised(
    host: str, port: int, router_id: str, tls: TlsFiles | None = None, *, pause_s: float = PAUSE_S
) -> None:
    """Call the relay's own address. Raises AdvertisedAddressError where it cannot be this router's.

    An address that does not answer from here may be one that only workers reach (behind a NAT): then it only warns.
    """
    answerer = _Answerer.US
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(pause_s)
        answerer = await _who_answers(host, port, router_id, tls)
        if answerer is _Answerer.US:
            return
    what = f"--relay-advertise {host}: {answerer.value.format(f'{host}:{port}')}"
    if answerer is not _Answerer.NOBODY:
        raise AdvertisedAddressError(f"{what}; give the host name or IP under which workers reach this router alone")
    log.warning("%s; requests are refused until a worker reaches it", what)


async def _who_answers(host: str, port: int, router_id: str, tls: TlsFiles | None) -> _Answerer:
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return _Answerer.NO_NAME if error.errno in _NO_SUCH_NAME else _Answerer.NOBODY
    hosts = sorted({str(info[4][0]) for info in infos})
    asked = await asyncio.gather(*(_ask(host, one, port, tls) for one in hosts))
    answers = [answer for answer in asked if answer is not None]
    if any(answer != router_id for answer in answers):
        return _Answerer.ANOTHER
    if answers:
        return _Answerer.US
    return _Answerer.NOBODY_HERE if all(ipaddress.ip_address(one).is_loopback for one in hosts) else _Answerer.NOBODY


async def _ask(name: str, host: str, port: int, tls: TlsFiles | None) -> str | None:
    """Return the id of the router at an IP address; empty for another kind of server, None where nothing answers."""
    target = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
    # Directly: a proxy is for the way to other hosts. Workers compare the certificate with the name.
    options = [("grpc.enable_http_proxy", 0), ("grpc.ssl_target_name_override", name.strip("[]"))]
    async with LiveChannel(target, tls, options) as channel:
        stub = channel.stub(relay_pb2_grpc.IdentityServiceStub)
        try:
            answer = await stub.Identify(pb.IdentifyRequest(), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            nothing = error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
            return None if nothing else ""
        return str(answer.router_id)
