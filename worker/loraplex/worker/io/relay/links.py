"""The worker's end of the relay: one gRPC stream to each live router, and to each router that has a job here.

    Results, Intake ──claimed, progressed──▶ RouterLinks ──▶ RouterLink ══stream══▶ router
    Results (RelayHandler) ◀──acked, cancel, cancel_choice, router_gone──┘ ◀═══════

    Presence (Redis's live routers) ──follow──▶ RouterLinks ──live──▶ Intake (claims for these routers alone)
    Intake (routers of jobs that it could not claim) ──dial──▶

Two ends may each reach Redis and not each other. So a worker claims only for routers that it has a live link to; jobs
of the others are left to workers that reach their router.

A link sends what its jobs have made since its last message: the first ids and the end of an answer at once, other ids
at the end of the interval that the router gives to its workers (router.dispatch.relay).

A broken stream is opened again. Its hello lists the jobs that this worker has, and the router's rewinds say from where
to send again. After `gone_s` without a stream its jobs are dropped. A silent one breaks within seconds (relay_options).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import grpc

from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc
from loraplex.runtime.rpc.server import relay_options
from loraplex.runtime.rpc.tls import LiveChannel
from loraplex.worker.engine_api import Removal
from loraplex.worker.io.local_jobs import LocalChoice, LocalJob, LocalJobs
from loraplex.worker.io.metrics import WorkerMetrics
from loraplex.worker.io.relay import NotARouterError
from loraplex.worker.io.relay.block_followers import BlockFollowers
from loraplex.worker.io.relay.frames import SendThrottle, add_frames, attempt_of, returned_frame

if TYPE_CHECKING:  # imported only with TLS: cryptography takes long
    from loraplex.worker.io.credentials import LinkCredentials

log = logging.getLogger(__name__)

# Options of the channel to a router, with the back-off of connection attempts in milliseconds: a router that was gone
# for a moment is found again soon. `min_reconnect_backoff_ms` is the timeout of one attempt.
CHANNEL_OPTIONS = [
    *relay_options(),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 500),
]


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The worker as its routers know it, and the links' times in seconds.

    `send_interval_s`: minimum time between two messages without the first ids or the end of an answer, until the router
    gives another (relay.v1.Pace). `gone_s`: time without a stream after which a router's jobs are dropped. `spare_s`:
    time without a stream after which other jobs may take their rows; longer than a router waits for a worker to come
    back before it dispatches its jobs again. `pause_s`: pause before a broken stream is opened again; without jobs of
    the router it doubles up to `pause_limit_s`. `beat_s`: interval of signs of life to routers that have jobs here.
    `claim_notice_s`: time after a claim in which the job's first frame is awaited, which tells of the claim as well.
    """

    worker_id: str
    incarnation: str
    send_interval_s: float = 0.020
    gone_s: float = 5.0
    spare_s: float = 0.5
    pause_s: float = 0.05
    pause_limit_s: float = 1.0
    beat_s: float = 0.5
    claim_notice_s: float = 0.002
    # The worker's base model.
    base_digest: str = ""
    # None: links without TLS.
    credentials: LinkCredentials | None = None


class ForgetError(Exception):
    """The worker does not know what to remove of a tenant, or its engine does not answer; the message is one line."""


class RelayHandler(Protocol):
    """Carries out what routers ask for: loraplex.worker.io.results.Results."""

    def remove(self, job_id: str, attempt: int) -> None:
        """Stop and remove a job: its router has all of it, or wants no more."""

    def cancel_choice(self, job_id: str, attempt: int, choice: int) -> None:
        """Stop and remove one answer of a job."""

    def router_gone(self, address: str) -> None:
        """Remove the jobs of a router that is out of reach."""


Stream = grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]


class RouterLink:
    """The stream to one router, opened again while the router is wanted or has jobs here."""

    def __init__(
        self,
        address: str,
        settings: LinkSettings,
        jobs: LocalJobs,
        handler: RelayHandler,
        metrics: WorkerMetrics,
        owner: RouterLinks,
    ) -> None:
        self._address = address
        self._settings = settings
        self._jobs = jobs
        self._handler = handler
        self._metrics = metrics
        self._owner = owner
        # Whether the router has welcomed the stream that is open now; else since when it has not answered.
        self.is_live = False
        self._lost_at = time.monotonic()
        self._loss_logged = False
        # Ends the pause before the next stream.
        self._hurry = asyncio.Event()
        # Contents of the next messages: claims, and answers with new ids or an end, in order.
        self._claims: list[LocalJob] = []
        self._claims_due = False
        self._progress: dict[LocalChoice, None] = {}
        # Frames that give back jobs which the router takes to be here, and which were removed.
        self._returned: list[pb.Frame] = []
        self._forgotten: list[pb.Forgotten] = []
        self._throttle = SendThrottle(settings.send_interval_s)
        self._beat_due = False
        self._sent_at = time.monotonic()
        self._closing = False
        self._failed = False  # a stream ended because of an error in this worker
        self._task = asyncio.create_task(self._run())

    @property
    def lost_s(self) -> float:
        """Return the seconds since the router answered last; 0 while it does."""
        return 0.0 if self.is_live else time.monotonic() - self._lost_at

    def hurry(self) -> None:
        """Open the next stream at once."""
        if not self.is_live:
            self._hurry.set()

    def claimed(self, local: LocalJob) -> None:
        """Send that this worker has a job, unless its first frame comes before."""
        if not self._claims:
            asyncio.get_running_loop().call_later(self._settings.claim_notice_s, self._notify_claims)
        self._claims.append(local)

    def _notify_claims(self) -> None:
        if self._claims:
            self._claims_due = True
            self._throttle.due.set()

    def progressed(self, choice: LocalChoice) -> None:
        """Send what an answer has got; nothing where it has no ids yet, as when a router asks for all of it."""
        if choice.has_news:
            self._progress[choice] = None
            self._throttle.request(urgent=choice.sent == 0 or choice.ending is not None)

    def forgotten(self, answer: pb.Forgotten) -> None:
        """Send the answer to a Forget."""
        self._forgotten.append(answer)
        self._throttle.due.set()

    def wake(self) -> None:
        """Send what waits."""
        self._throttle.due.set()

    def beat(self) -> None:
        """Send a sign of life, unless the router has just heard of this worker."""
        if self.is_live and time.monotonic() - self._sent_at >= self._settings.beat_s:
            self._beat_due = True
            self._throttle.due.set()

    async def _run(self) -> None:
        try:
            await self._keep_open()
        finally:  # whatever ended this link, later jobs must open another
            self._throttle.stop()
            self._owner.ended(self._address, self)

    async def _keep_open(self) -> None:
        lost_at, pause_s = time.monotonic(), self._settings.pause_s
        credentials = self._settings.credentials
        async with LiveChannel(self._address, credentials.tls if credentials else None, CHANNEL_OPTIONS) as channel:
            while True:
                if await self._serve(channel.stub(relay_pb2_grpc.RelayServiceStub)):
                    lost_at, pause_s = time.monotonic(), self._settings.pause_s
                jobs = self._jobs.of_router(self._address)
                if jobs and time.monotonic() - lost_at > self._settings.gone_s:
                    log.warning("router %s is out of reach; %d jobs are dropped", self._address, len(jobs))
                    self._handler.router_gone(self._address)
                    lost_at, jobs = time.monotonic(), []
                if not jobs and not self._owner.is_wanted(self._address):
                    # Before anything is awaited: a job that comes now must open a link of its own.
                    self._owner.ended(self._address, self)
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._hurry.wait()
                self._hurry.clear()
                pause_s = self._settings.pause_s if jobs else min(2 * pause_s, self._settings.pause_limit_s)

    async def _serve(self, stub: relay_pb2_grpc.RelayServiceAsyncStub) -> bool:
        """Run one stream until it ends; returns whether the router answered, without an error in this worker."""
        reached, self._failed = False, False
        call, self._welcomed, credentials = stub.Connect(), asyncio.Event(), self._settings.credentials
        nonce = credentials.new_nonce() if credentials else b""
        # grpc makes a task for an iterator of requests, and does not end it when the router dies.
        writing = asyncio.create_task(self._write(call, nonce))
        try:
            async for response in call:
                if credentials and not reached:
                    credentials.check(nonce, response)
                reached = True  # the first response is the welcome
                self._welcomed.set()
                self._set_live()
                self._handle(response)
        except (grpc.aio.AioRpcError, NotARouterError) as error:
            self._log_loss(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The call was cancelled, not this task: its messages could not be made.
            log.info("router %s: link lost (cancelled)", self._address)
        except Exception:
            log.exception("router %s: its messages could not be handled", self._address)
            self._failed = True
        finally:
            call.cancel()
            if self.is_live:
                self.is_live, self._lost_at = False, time.monotonic()
                self._owner.changed()
            self._owner.followers.follow(self, False)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        return reached and not self._failed

    def _set_live(self) -> None:
        """Note that the router answers."""
        if not self.is_live:
            self.is_live = True
            if self._loss_logged:
                log.info("router %s: linked again", self._address)
            self._loss_logged = False
            self._owner.changed()

    def _log_loss(self, error: grpc.aio.AioRpcError | NotARouterError) -> None:
        """Log why the stream ended or could not be opened, once until the router answers again."""
        if self._loss_logged:
            return
        self._loss_logged = True
        if isinstance(error, NotARouterError):
            log.warning("%s answers as a router and is none: %s; nothing is sent to it", self._address, error)
            return
        what = "link lost" if self.is_live else "not reached"
        why = f"{error.code().name}: {error.details()}"
        log.info("router %s: %s (%s); until it answers its jobs are left to other workers", self._address, what, why)

    async def _write(self, call: Stream, nonce: bytes) -> None:
        """Send the messages of one stream: the hello, then claims and frames as they come."""
        try:
            await call.write(self._hello(nonce))
            if nonce:  # only a router gets tokens
                await self._welcomed.wait()
            while (request := self._next_request()) is not None or not self._closing:
                if request is None:
                    self._throttle.due.clear()
                    await self._throttle.due.wait()
                else:
                    self._sent_at = time.monotonic()
                    await call.write(request)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream has ended, as its reader learns
            return
        except Exception:
            log.exception("router %s: messages to it could not be made", self._address)
            self._failed = True
            call.cancel()

    def _hello(self, nonce: bytes) -> pb.ConnectRequest:
        """List the jobs of this router; frames tell again of answers that were given back."""
        jobs = self._jobs.of_router(self._address)
        self._claims, self._returned = [], []
        self._progress = {choice: None for local in jobs for choice in local.returned}
        if self._progress:
            self._throttle.due.set()
        hello = pb.Hello(worker_id=self._settings.worker_id, incarnation=self._settings.incarnation, nonce=nonce)
        hello.holds.extend(attempt_of(local) for local in jobs)
        return pb.ConnectRequest(hello=hello)

    def _next_request(self) -> pb.ConnectRequest | None:
        if (self._progress or self._returned) and (self._closing or self._throttle.due.is_set()):
            self._throttle.sent()
            request = pb.ConnectRequest()  # filled in place: a copy of a long frame takes longer than all else
            frames = request.frames.frames
            frames.extend(self._returned)
            add_frames(self._progress, request.frames)
            self._returned.clear()
            if self._progress:  # the rest goes with the next message
                self._throttle.due.set()
            self._metrics.messages.inc()
            self._metrics.frames.inc(len(frames))
            # A frame says as well who has its job.
            shown = {(frame.job_id, frame.attempt) for frame in frames}
            self._claims = [local for local in self._claims if (local.job.job_id, local.job.attempt) not in shown]
            return request
        if self._claims and (self._closing or self._claims_due):
            claims, self._claims, self._claims_due = self._claims, [], False
            return pb.ConnectRequest(claims=pb.Claims(jobs=[attempt_of(local) for local in claims]))
        if self._forgotten:
            return pb.ConnectRequest(forgotten=self._forgotten.pop(0))
        if (changes := self._owner.followers.next_message(self)) is not None:
            return pb.ConnectRequest(block_changes=changes)
        if self._beat_due:
            self._beat_due = False
            return pb.ConnectRequest(beat=pb.Beat())
        return None

    def _handle(self, response: pb.ConnectResponse) -> None:
        match response.WhichOneof("message"):
            case "acks":
                for ack in response.acks.jobs:
                    self._handler.remove(ack.job_id, ack.attempt)
            case "cancels":
                for job in response.cancels.jobs:
                    if job.HasField("choice"):
                        self._handler.cancel_choice(job.job_id, job.attempt, job.choice)
                    else:
                        self._handler.remove(job.job_id, job.attempt)
            case "rewinds":
                for position in response.rewinds.positions:
                    self._rewind(position)
            case "pace":
                self._throttle.interval_s = response.pace.interval_ms / 1e3
            case "forget":
                self._owner.forget(response.forget, self)
            case "follow_blocks":
                self._owner.followers.follow(self, response.follow_blocks.on)

    def _rewind(self, at: pb.Position) -> None:
        local = self._jobs.get(at.job_id, at.attempt)
        if local is None:  # removed after the hello that listed it
            self._returned.append(returned_frame(at.job_id, at.attempt))
            self._throttle.due.set()
        elif (choice := local.choices.get(at.choice)) is not None:
            choice.rewind(at.offset)
            self.progressed(choice)

    async def close(self, flush_s: float) -> None:
        """End the stream once all is sent, at most after `flush_s`; the router ends its side when it has read all."""
        self._closing = True
        self._throttle.due.set()
        if self.is_live or self._jobs.of_router(self._address):
            self.hurry()
            await asyncio.wait({self._task}, timeout=flush_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def _not_yet(tenant: str) -> Mapping[str, Removal]:
    raise ForgetError("the worker does not serve yet")


class RouterLinks:
    """The links of one engine session, by router address."""

    def __init__(
        self, settings: LinkSettings, jobs: LocalJobs, handler: RelayHandler, metrics: WorkerMetrics | None = None
    ) -> None:
        self._settings = settings
        self._jobs = jobs
        self._handler = handler
        self._metrics = metrics or WorkerMetrics()
        self.followers = BlockFollowers(settings.base_digest)
        self._links: dict[str, RouterLink] = {}
        # Routers that live, as Redis said last.
        self._routers: frozenset[str] = frozenset()
        self._closing = False
        self._forgetting: set[asyncio.Task[None]] = set()
        # Removes a tenant's data from this worker.
        self.forget_tenant: Callable[[str], Awaitable[Mapping[str, Removal]]] = _not_yet
        # Set when a link has come up or is lost, and then replaced.
        self.next_change = asyncio.Event()

    @property
    def live(self) -> tuple[str, ...]:
        """Return the addresses of the routers that answer over their link."""
        return tuple(address for address, link in self._links.items() if link.is_live)

    @property
    def lost(self) -> frozenset[str]:
        """Return the routers that have not answered for a while: rows of their jobs may go to other jobs."""
        return frozenset(address for address, link in self._links.items() if link.lost_s > self._settings.spare_s)

    def follow(self, addresses: Collection[str]) -> None:
        """Keep a link to each of these live routers. A link to another one lasts while it is open or has jobs."""
        self._routers = frozenset(addresses)
        for address in addresses:
            self._keep(address)
        self._count()

    def dial(self, addresses: Iterable[str]) -> None:
        """Try at once to reach these routers: jobs of them wait."""
        for address in addresses:
            link = self._keep(address)
            if link is not None:
                link.hurry()

    def claimed(self, local: LocalJob) -> None:
        """Tell the job's router which worker has it."""
        self._link(local.job.reply_to).claimed(local)

    def progressed(self, choice: LocalChoice) -> None:
        """Send what an answer has got: ids, or its end."""
        self._link(choice.job.reply_to).progressed(choice)

    def forget(self, request: pb.Forget, link: RouterLink) -> None:
        """Remove a tenant's data in the background, and give the answer to the link."""
        task = asyncio.create_task(self._forget(request, link))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _forget(self, request: pb.Forget, link: RouterLink) -> None:
        answer = pb.Forgotten(number=request.number)
        try:
            for place, removal in (await self.forget_tenant(request.tenant)).items():
                answer.removals.add(
                    place=place, removed=removal.removed, left=removal.left, of_all_tenants=removal.of_all_tenants
                )
        except ForgetError as error:
            answer.error = str(error)
        link.forgotten(answer)

    def is_wanted(self, address: str) -> bool:
        """Return whether a link is to be opened again when it breaks, though no job of its router is here."""
        return address in self._routers and not self._closing

    def changed(self) -> None:
        """Note that a link has come up, or is lost."""
        self._count()
        self.next_change.set()
        self.next_change = asyncio.Event()

    def ended(self, address: str, link: RouterLink) -> None:
        """Forget an ended link; the next message opens a new one."""
        if self._links.get(address) is link:
            del self._links[address]

    def keep_alive(self) -> None:
        """Send a keep-alive on links of local jobs that carried nothing else; called twice a second.

        A router that does not find this worker in Redis any more so knows that its jobs go on.
        """
        for address in dict.fromkeys(local.job.reply_to for local in self._jobs.all()):
            link = self._links.get(address)
            if link is not None:
                link.beat()

    async def close(self, flush_s: float) -> None:
        """End every link; what is still to be sent has `flush_s`."""
        self._closing = True
        for task in self._forgetting:
            task.cancel()
        await asyncio.gather(*[link.close(flush_s) for link in self._links.values()])

    def _keep(self, address: str) -> RouterLink | None:
        return None if self._closing else self._link(address)

    def _link(self, address: str) -> RouterLink:
        link = self._links.get(address)
        if link is None:
            link = RouterLink(address, self._settings, self._jobs, self._handler, self._metrics, self)
            self._links[address] = link
        return link

    def _count(self) -> None:
        live = len(self.live)
        self._metrics.router_links.labels("live").set(live)
        self._metrics.router_links.labels("lost").set(len(self._routers.difference(self.live)))
