"""The jobs of a router: admission to the queue, attempts, and the one recovery operation.

A worker that dies, drains or loses its link, a claim that no worker reports: each leads to attempt + 1, with the prompt
and the ids emitted so far. A frame is taken only from the incarnation that the job's current attempt is bound to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress

from broker.connection import REDIS_DOWN
from broker.ledger import ReserveCall
from broker.messages import Job
from broker.quarantine import QuarantinedError
from broker.queue import JobQueue, UnreservedError
from broker.terms import Placement
from router.dispatch.early_entry import EarlyEntry
from router.dispatch.job_state import JobState
from router.dispatch.link import Frame, Link
from router.dispatch.outbox import Outbox
from router.dispatch.reader_rounds import ReaderRounds
from router.dispatch.refusals import REFUSALS, refusal
from router.dispatch.routed_job import RoutedJob
from router.dispatch.timing import DispatchTiming
from router.dispatch.unbound_jobs import UnboundJobs
from router.dispatch.weighted_sets import check_weighted_sets
from router.dispatch.worker_links import WorkerLinks
from router.metrics import LOST, RETURNED, RouterMetrics
from rpc.errors import CallError, DeadlinePassed, Internal, Unavailable
from telemetry.logging import fields

log = logging.getLogger(__name__)

# Reason that the client gets of a request that kills engines.
POISON = "POISON_REQUEST"


class Dispatcher:
    """The jobs that one router owns."""

    def __init__(
        self,
        queue_of: Callable[[str], JobQueue],
        place: Callable[[Job], Placement],
        metrics: RouterMetrics | None = None,
        timing: DispatchTiming | None = None,
        links: WorkerLinks | None = None,
        why_unservable: Callable[[Job], CallError | None] = lambda job: None,
    ) -> None:
        self._queue_of = queue_of
        self._place = place
        self._metrics = metrics or RouterMetrics()
        self._timing = timing or DispatchTiming()
        self._jobs: dict[str, RoutedJob] = {}
        self._links = links or WorkerLinks(self._timing)
        self._outbox = Outbox(queue_of, place, self._timing, self._metrics)
        self._unbound_jobs = UnboundJobs(
            queue_of, lambda: self.jobs, self._redispatch, why_unservable, self._metrics, self._timing
        )
        self._rounds = ReaderRounds()
        self._grace_periods: set[asyncio.Task[None]] = set()

    @property
    def jobs(self) -> Iterable[RoutedJob]:
        """Return the jobs that wait or run now."""
        return tuple(self._jobs.values())

    def early_entry(self, job: Job) -> EarlyEntry:
        """Make a new job's entry in the queue while something else is waited for."""
        return EarlyEntry(self._queue_of(job.model), job, self._place)

    async def dispatch(
        self, job: Job, early: EarlyEntry | None = None, reserve: ReserveCall | None = None
    ) -> RoutedJob:
        """Put a new job into the queue, after `reserve`; own it till `release`. Raises CallError or UnreservedError."""
        check_weighted_sets(job, (other.job for other in self._jobs.values()))
        routed = self._jobs[job.job_id] = RoutedJob(job, self._rounds)
        try:
            routed.placement, _ = (early := early or self.early_entry(job)).take()
            await self._enqueue(job, early, reserve)
        except UnreservedError:  # Redis does not have it
            self._jobs.pop(job.job_id).release()
            raise
        except BaseException as error:
            self.release(routed)
            if isinstance(error, (asyncio.CancelledError, Unavailable)):  # Redis may get the job after its removal
                asyncio.get_running_loop().call_later(self._timing.late_enqueue_s, self._outbox.finish, job)
            raise
        routed.enqueued(job.attempt)
        return routed

    async def _enqueue(self, job: Job, early: EarlyEntry, reserve: ReserveCall | None) -> None:
        try:
            with self._metrics.enqueue_time.time():
                await early.enqueue(reserve)
        except REFUSALS as error:
            if isinstance(error, QuarantinedError):
                self._metrics.quarantined.inc()
            raise refusal(error, job.tenant) from error
        except REDIS_DOWN as error:
            log.warning("the queue does not answer: %r", error, extra=fields(job_id=job.job_id))
            raise Unavailable("the queue does not answer", reason="QUEUE_DOWN") from error

    def release(self, routed: RoutedJob) -> None:
        """Stop a job wherever it is: nothing of it stays queued or running."""
        del self._jobs[routed.job.job_id]
        routed.release()
        if routed.link is None:
            self._outbox.finish(routed.job)
        elif not routed.finished_by_worker:
            routed.link.cancel(routed.job.job_id, routed.job.attempt)

    def bound_to(self, job_id: str, attempt: int) -> str:
        """Return the incarnation that an attempt is bound to; empty where it is not current, or bound to none."""
        routed = self._jobs.get(job_id)
        return "" if routed is None or routed.link is None or routed.job.attempt != attempt else routed.link.incarnation

    # Messages of workers

    def link_up(self, link: Link, holds: Sequence[tuple[str, int]]) -> None:
        """Take the link of a worker, perhaps a new one: it goes on with the jobs that are still its own."""
        self._links.up(link)
        for job_id, attempt in holds:
            routed = self._bind(link, job_id, attempt)
            for choice in routed.choices if routed else ():
                if choice.ended:
                    link.cancel(job_id, attempt, choice.index)
                else:
                    link.rewind(job_id, attempt, choice.index, len(choice.emitted))
        held = {job_id for job_id, _ in holds}
        for routed in self._bound_to({link.incarnation}):
            if routed.job.job_id not in held:
                self._metrics.redispatches.labels(LOST).inc()
                self._redispatch(routed)

    def link_down(self, link: Link) -> None:
        """Note that a link broke: its worker has a moment to come back, then its jobs go on elsewhere."""
        if self._links.down(link):
            task = asyncio.get_running_loop().create_task(self._wait_for_link(link.incarnation))
            self._grace_periods.add(task)
            task.add_done_callback(self._grace_periods.discard)

    async def _wait_for_link(self, incarnation: str) -> None:
        await asyncio.sleep(self._timing.link_grace_s)
        if incarnation not in self._links.incarnations:
            self._redispatch_jobs_of({incarnation})

    def receive_claims(self, link: Link, jobs: Sequence[tuple[str, int]]) -> None:
        """Bind the jobs that a worker has claimed."""
        for job_id, attempt in jobs:
            self._bind(link, job_id, attempt)

    def receive_frame(self, link: Link, frame: Frame) -> None:
        """Take tokens, or the end, of a job."""
        routed = self._bind(link, frame.job_id, frame.attempt)
        if routed is None:
            self._metrics.stale.inc()
            return
        if frame.choice >= len(routed.choices):
            log.warning("worker %s: job %s has no choice %d", link.worker_id, frame.job_id, frame.choice)
        elif frame.returned:
            # After a gap the next attempt goes on from what is here: that costs a little work and no wait.
            routed.accept(frame)
            link.ack(frame.job_id, frame.attempt)
            self._take_back(routed, blamed=frame.blamed)
        elif not routed.accept(frame):
            self._metrics.rewinds.inc()
            emitted = routed.choices[frame.choice].emitted
            link.rewind(frame.job_id, frame.attempt, frame.choice, len(emitted))
        elif frame.failure is not None:
            routed.fail(frame.failure)
            link.ack(frame.job_id, frame.attempt)
        elif frame.finish is not None and routed.finished_by_worker:
            link.ack(frame.job_id, frame.attempt)

    def _bind(self, link: Link, job_id: str, attempt: int) -> RoutedJob | None:
        """Return the job if this link has its current attempt now; cancel it at the worker otherwise."""
        routed = self._jobs.get(job_id)
        if routed is not None and routed.bind(link, attempt):
            return routed
        link.cancel(job_id, attempt)
        return None

    # Recovery

    def update_live_workers(self, incarnations: AbstractSet[str]) -> None:
        """Dispatch again the jobs of workers that are missing in Redis, and silent though their link is open.

        End the jobs that no live worker can take.
        """
        bound = {routed.link.incarnation for routed in self._jobs.values() if routed.link is not None}
        self._redispatch_jobs_of(self._links.lost(bound, incarnations))
        self._unbound_jobs.end_unservable()

    def fail_waiting(self, model: str, error_of: Callable[[str], CallError]) -> None:
        """End the jobs of a model that no worker has: no worker could claim them."""
        for routed in self._jobs.values():
            if routed.job.model == model and not routed.ended and routed.state is not JobState.BOUND:
                routed.fail(error_of(model))

    def _redispatch_jobs_of(self, incarnations: AbstractSet[str]) -> None:
        jobs = self._bound_to(incarnations)
        if jobs:
            self._metrics.workers_lost.inc(len({routed.link.incarnation for routed in jobs if routed.link}))
            self._metrics.redispatches.labels(LOST).inc(len(jobs))
            names = ", ".join(sorted(incarnations))
            log.warning("lost worker incarnations %s; %d jobs are dispatched again", names, len(jobs))
        for routed in jobs:
            self._redispatch(routed)

    def _bound_to(self, incarnations: AbstractSet[str]) -> list[RoutedJob]:
        bound = (routed for routed in self._jobs.values() if routed.state is JobState.BOUND)
        return [routed for routed in bound if routed.link is not None and routed.link.incarnation in incarnations]

    def _take_back(self, routed: RoutedJob, *, blamed: bool) -> None:
        """Dispatch a returned job again, unless it killed an engine that had nothing else."""
        if not (blamed and routed.job.on_trial):
            self._metrics.redispatches.labels(RETURNED).inc()
            self._redispatch(routed, blamed=blamed)
            return
        self._metrics.poisoned.inc()
        deaths = routed.job.strikes + 1
        log_fields = fields(job_id=routed.job.job_id, tenant=routed.job.tenant)
        log.error("a job ends: %d engines died of it, the last one while it ran alone", deaths, extra=log_fields)
        routed.fail(Internal(f"{deaths} engines died of this request, the last one while it ran alone", reason=POISON))
        self._outbox.add_dead_letter(routed, POISON)
        self._outbox.record_death(routed.job)

    def _redispatch(self, routed: RoutedJob, *, blamed: bool = False) -> None:
        if routed.late:
            routed.fail(DeadlinePassed("the deadline passed before the answer's end"))
            return
        routed.next_attempt(blamed=blamed)
        self._outbox.enqueue(routed)

    async def redispatch_missing(self) -> None:
        """Dispatch again the jobs that left the queue and that no worker reported; never returns."""
        await self._unbound_jobs.look()

    async def drain_tasks(self) -> None:
        """Wait for what was begun in the background, up to a timeout: Redis may be gone for good."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timing.drain_s):
                while self._grace_periods:
                    await asyncio.gather(*self._grace_periods, return_exceptions=True)
                await self._outbox.drain_tasks()
