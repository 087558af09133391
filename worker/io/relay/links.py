"""The worker's end of the relay: one gRPC stream to every router that it works for.

    Results, Intake ──claimed, progressed──▶ RouterLinks ──▶ RouterLink ══stream══▶ router
    Results (RelayHandler) ◀──acked, cancel, cancel_choice, router_gone──┘ ◀═══════

A link sends what its jobs have made since its last message. The first ids and the end of an answer are sent at once;
other ids are throttled where sending takes cores that the engine computes on.

A broken stream is opened again. Its hello lists the jobs that this worker still has, and the router's rewinds say from
where to send again, so a link that is down remembers nothing. After `gone_s` without a stream its jobs are dropped. A
silent stream breaks within seconds (rpc.server.relay_options).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

import grpc
from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc

from rpc.server import relay_options
from worker.io.local_jobs.choice import LocalChoice
from worker.io.local_jobs.jobs import LocalJob, LocalJobs
from worker.io.metrics import WorkerMetrics
from worker.io.relay.frames import attempt_of, next_frame
from worker.io.relay.handler import RelayHandler
from worker.io.relay.link_settings import LinkSettings
from worker.io.relay.send_throttle import SendThrottle

log = logging.getLogger(__name__)

# Back-off of gRPC's connection attempts, in milliseconds: a router that was gone for a moment is found again soon.
# `min_reconnect_backoff_ms` is the timeout of one attempt.
_OPTIONS = [
    *relay_options(),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 500),
]


class RouterLinks:
    """The links of one engine session, by router address; opened by the first job of a router."""

    def __init__(
        self, settings: LinkSettings, jobs: LocalJobs, handler: RelayHandler, metrics: WorkerMetrics | None = None
    ) -> None:
        self._settings = settings
        self._jobs = jobs
        self._handler = handler
        self._metrics = metrics or WorkerMetrics()
        self._links: dict[str, RouterLink] = {}

    def claimed(self, local: LocalJob) -> None:
        """Tell the job's router which worker has it."""
        self._link(local.job.reply_to).claimed(local)

    def progressed(self, choice: LocalChoice) -> None:
        """Send what an answer has got: ids, or its end."""
        self._link(choice.job.reply_to).progressed(choice)

    def _link(self, address: str) -> RouterLink:
        link = self._links.get(address)
        if link is None:
            shared = (self._settings, self._jobs, self._handler, self._metrics, self._forget)
            link = self._links[address] = RouterLink(address, *shared)
        return link

    def _forget(self, address: str, link: RouterLink) -> None:
        if self._links.get(address) is link:
            del self._links[address]

    async def close(self, flush_s: float) -> None:
        """End every link; what is still to be sent has `flush_s`."""
        await asyncio.gather(*[link.close(flush_s) for link in self._links.values()])


class RouterLink:
    """The stream to one router, opened again while there is something to send."""

    def __init__(
        self,
        address: str,
        settings: LinkSettings,
        jobs: LocalJobs,
        handler: RelayHandler,
        metrics: WorkerMetrics,
        forget: Callable[[str, RouterLink], None],
    ) -> None:
        self._address = address
        self._settings = settings
        self._jobs = jobs
        self._handler = handler
        self._metrics = metrics
        self._forget = forget
        # What the next messages tell: claims, and answers that have progressed, in order.
        self._claims: list[LocalJob] = []
        self._claims_due = False
        self._progress: dict[LocalChoice, None] = {}
        self._throttle = SendThrottle(settings.send_interval_s)
        self._closing = False
        self._failed = False  # a stream ended because of an error in this worker
        self._stream = object()
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
        """Send what an answer has got."""
        self._progress[choice] = None
        self._throttle.request(urgent=choice.sent == 0 or choice.ending is not None)

    async def _run(self) -> None:
        try:
            await self._keep_open()
        finally:  # whatever ended this link, later jobs must open another
            self._throttle.stop()
            self._forget(self._address, self)

    async def _keep_open(self) -> None:
        lost_at = time.monotonic()
        async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            stub = relay_pb2_grpc.RelayServiceStub(channel)
            while True:
                if await self._serve(stub):
                    lost_at = time.monotonic()
                jobs = self._jobs.of_router(self._address)
                if not jobs or time.monotonic() - lost_at > self._settings.gone_s:
                    break
                await asyncio.sleep(self._settings.retry_s)
            # Before anything is awaited: a job that comes now must open a link of its own.
            self._forget(self._address, self)
            if jobs:
                log.warning("router %s is out of reach; %d jobs are dropped", self._address, len(jobs))
                self._handler.router_gone(self._address)

    async def _serve(self, stub: relay_pb2_grpc.RelayServiceAsyncStub) -> bool:
        """Run one stream until it ends; returns whether the router answered, without an error in this worker."""
        reached, self._failed = False, False
        call = stub.Connect(self._requests())
        try:
            async for response in call:
                reached = True  # the first response is the welcome
                self._handle(response)
        except grpc.aio.AioRpcError as error:
            log.info("router %s: link lost (%s)", self._address, error.code().name)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The call was cancelled, not this task: grpc ends it so when its requests fail.
            log.info("router %s: link lost (cancelled)", self._address)
        except Exception:
            log.exception("router %s: its messages could not be handled", self._address)
            self._failed = True
        finally:
            call.cancel()
        return reached and not self._failed

    async def _requests(self) -> AsyncIterator[pb.ConnectRequest]:
        """Yield the messages of one stream: the hello, then claims and frames as they come."""
        # A broken call goes on asking its requests for a while: it must not take what the next stream is to send.
        stream = self._stream = object()
        due = self._throttle.due
        try:
            yield self._hello()
            while self._stream is stream:
                if (request := self._next_request()) is not None:
                    yield request
                elif self._closing:
                    return
                else:
                    due.clear()
                    await due.wait()
            due.set()  # the wake-up may have been for the stream that took over
        except Exception:  # grpc does not log it
            log.exception("router %s: messages to it could not be made", self._address)
            self._failed = True
            raise

    def _hello(self) -> pb.ConnectRequest:
        """List the jobs of this router; frames tell again of answers that were given back."""
        jobs = self._jobs.of_router(self._address)
        self._claims = []
        self._progress = {choice: None for local in jobs for choice in local.returned}
        if self._progress:
            self._throttle.due.set()
        hello = pb.Hello(worker_id=self._settings.worker_id, incarnation=self._settings.incarnation)
        hello.holds.extend(attempt_of(local) for local in jobs)
        return pb.ConnectRequest(hello=hello)

    def _next_request(self) -> pb.ConnectRequest | None:
        if self._progress and (self._closing or self._throttle.due.is_set()):
            self._throttle.sent()
            progress, self._progress = self._progress, {}
            self._metrics.messages.inc()
            self._metrics.frames.inc(len(progress))
            # A frame says as well who has its job.
            shown = {id(choice.job) for choice in progress}
            self._claims = [local for local in self._claims if id(local.job) not in shown]
            return pb.ConnectRequest(frames=pb.FrameBatch(frames=[next_frame(choice) for choice in progress]))
        if self._claims and (self._closing or self._claims_due):
            claims, self._claims, self._claims_due = self._claims, [], False
            return pb.ConnectRequest(claims=pb.Claims(jobs=[attempt_of(local) for local in claims]))
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
                    choice = local.choices.get(at.choice) if local else None
                    if choice is not None:
                        choice.rewind(at.offset)
                        self.progressed(choice)

    async def close(self, flush_s: float) -> None:
        """End the stream once all is sent, at most after `flush_s`; the router ends its side when it has read all."""
        self._closing = True
        self._throttle.due.set()
        await asyncio.wait({self._task}, timeout=flush_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
