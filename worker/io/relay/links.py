"""The worker's end of the relay: one gRPC stream to a router.

    Results, Intake ──claimed, progressed──▶ RouterLinks ──▶ RouterLink ══stream══▶ router
    Results (RelayHandler) ◀──acked, cancel, cancel_choice, router_gone──┘ ◀═══════

The stream stays open while the router lives (router_links.py), since a worker claims only for routers that it reaches.
A link sends what its jobs have made since its last message: the first ids and the end of an answer at once, other ids
at the end of the interval that the router gives to its workers (router.dispatch.relay).

A broken stream is opened again. Its hello lists the jobs that this worker has, and the router's rewinds say from where
to send again. After `gone_s` without a stream its jobs are dropped. A silent one breaks within seconds (relay_options).
"""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc

from rpc.identity.tls import LiveChannel
from worker.io.local_jobs.choice import LocalChoice
from worker.io.local_jobs.jobs import LocalJob, LocalJobs
from worker.io.metrics import WorkerMetrics
from worker.io.relay.frames import attempt_of, next_frames, returned_frame
from worker.io.relay.handler import LinkOwner, RelayHandler
from worker.io.relay.link_settings import CHANNEL_OPTIONS, LinkSettings
from worker.io.relay.link_state import LinkState, NotARouterError
from worker.io.relay.send_throttle import SendThrottle

log = logging.getLogger(__name__)

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
        owner: LinkOwner,
    ) -> None:
        self._address = address
        self._settings = settings
        self._jobs = jobs
        self._handler = handler
        self._metrics = metrics
        self._owner = owner
        self.state = LinkState(address, owner.changed)
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

    def beat(self) -> None:
        """Send a sign of life, unless the router has just heard of this worker."""
        if self.state.is_live and time.monotonic() - self._sent_at >= self._settings.beat_s:
            self._beat_due = True
            self._throttle.due.set()

    async def _run(self) -> None:
        try:
            await self._keep_open()
        finally:  # whatever ended this link, later jobs must open another
            self._throttle.stop()
            self._owner.ended(self._address, self)

    async def _keep_open(self) -> None:
        lost_at, pause_s = time.monotonic(), self._settings.retry_s
        credentials = self._settings.credentials
        async with LiveChannel(self._address, credentials.tls if credentials else None, CHANNEL_OPTIONS) as channel:
            while True:
                if await self._serve(channel.stub(relay_pb2_grpc.RelayServiceStub)):
                    lost_at, pause_s = time.monotonic(), self._settings.retry_s
                jobs = self._jobs.of_router(self._address)
                if jobs and time.monotonic() - lost_at > self._settings.gone_s:
                    log.warning("router %s is out of reach; %d jobs are dropped", self._address, len(jobs))
                    self._handler.router_gone(self._address)
                    lost_at, jobs = time.monotonic(), []
                if not jobs and not self._owner.is_wanted(self._address):
                    # Before anything is awaited: a job that comes now must open a link of its own.
                    self._owner.ended(self._address, self)
                    return
                await self.state.pause(pause_s)
                pause_s = self._settings.retry_s if jobs else min(2 * pause_s, self._settings.retry_limit_s)

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
                self.state.welcomed()
                self._handle(response)
        except (grpc.aio.AioRpcError, NotARouterError) as error:
            self.state.failed(error)
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
            self.state.ended()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        return reached and not self._failed

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
            frames, self._returned = [*self._returned, *next_frames(self._progress)], []
            if self._progress:  # the rest goes with the next message
                self._throttle.due.set()
            self._metrics.messages.inc()
            self._metrics.frames.inc(len(frames))
            # A frame says as well who has its job.
            shown = {(frame.job_id, frame.attempt) for frame in frames}
            self._claims = [local for local in self._claims if (local.job.job_id, local.job.attempt) not in shown]
            return pb.ConnectRequest(frames=pb.FrameBatch(frames=frames))
        if self._claims and (self._closing or self._claims_due):
            claims, self._claims, self._claims_due = self._claims, [], False
            return pb.ConnectRequest(claims=pb.Claims(jobs=[attempt_of(local) for local in claims]))
        if self._forgotten:
            return pb.ConnectRequest(forgotten=self._forgotten.pop(0))
        if self._beat_due:
            self._beat_due = False
            return pb.ConnectRequest(beat=pb.Beat())
        return None

    def _handle(self, response: pb.ConnectResponse) -> None:
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
                    local = self._jobs.get(at.job_id, at.attempt)
                    if local is None:  # removed after the hello that listed it
                        self._returned.append(returned_frame(at.job_id, at.attempt))
                        self._throttle.due.set()
                    elif (choice := local.choices.get(at.choice)) is not None:
                        choice.rewind(at.offset)
                        self.progressed(choice)
            case "pace":
                self._throttle.interval_s = response.pace.interval_ms / 1e3
            case "forget":
                self._owner.forget(response.forget, self)

    async def close(self, flush_s: float) -> None:
        """End the stream once all is sent, at most after `flush_s`; the router ends its side when it has read all."""
        self._closing = True
        self._throttle.due.set()
        if self.state.is_live or self._jobs.of_router(self._address):
            self.state.hurry()
            await asyncio.wait({self._task}, timeout=flush_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
