"""The jobs of a router: admission to the queue, attempts, and the one recovery operation.

A worker that dies, drains or loses its link, a claim that no worker reports: each leads to attempt + 1, with the prompt
and the ids emitted so far. A frame is taken only from the incarnation that the job's current attempt is bound to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace

from redis.exceptions import ConnectionError as RedisConnectionError

from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.ledger import Asked, LedgerUnreadyError, QuotaReachedError
from loraplex.contracts.broker.messages import Job
from loraplex.contracts.broker.queue import JobQueue, QuarantinedError
from loraplex.contracts.broker.terms import Placement, QueueState
from loraplex.router.dispatch.cells import WORKERS_TRIED, Cells
from loraplex.router.dispatch.links import DispatchTiming, Frame, WorkerLink, WorkerLinks
from loraplex.router.dispatch.outbox import REFUSALS, Outbox, queue_full, refusal
from loraplex.router.dispatch.routed_job import JobState, ReaderRounds, RoutedJob
from loraplex.router.metrics import LOST, MOVED, RETURNED, UNCLAIMED, RouterMetrics
from loraplex.runtime.rpc.errors import CallError, DeadlinePassed, Exhausted, Internal, Unavailable
from loraplex.runtime.telemetry.logging import fields

log = logging.getLogger(__name__)

# Maximum number of different sets of one tenant whose answers a router holds at a time.
WEIGHTED_SETS = 16
# Time in seconds after which a refused client is to call again.
_RETRY_S = 1.0


def check_weighted_sets(job: Job, others: Iterable[Job]) -> None:
    """Raise Exhausted if a new job's weighted set exceeds the tenant's; sets in use and resumed ones are free."""
    if job.adapter is None or not job.adapter.parts or job.resumed:
        return
    used = {
        other.adapter.digest
        for other in others
        if other.tenant == job.tenant and other.adapter is not None and other.adapter.parts
    }
    if job.adapter.digest not in used and len(used) >= WEIGHTED_SETS:
        raise Exhausted(
            f"tenants/{job.tenant}/weighted-sets",
            f"{job.tenant} uses {len(used)} weighted sets of adapters at this router, the maximum",
            retry_after_s=_RETRY_S,
            reason="WEIGHTED_SETS_FULL",
        )


# Maximum number of jobs that are sealed anew in one look: each takes the event loop some 0.2 ms.
_RENEWALS_PER_LOOK = 32
# Maximum number of times that the time for which a job may be missing is doubled.
_GRACE_DOUBLINGS = 3
_IN_QUEUE = frozenset({JobState.QUEUED, JobState.MISSING})
_UNBOUND = _IN_QUEUE | {JobState.ENQUEUEING}
# Maximum number of waiting jobs that go to another cell at one look: each takes an enqueue and a removal.
_MOVED_PER_LOOK = 512


# Reasons of failures that are of a worker, not of a job: another may have the store, room, bytes that are right.
WORKERS_OWN = frozenset(
    {
        *("ADAPTER_TOO_LARGE", "ADAPTER_UNLOADABLE", "DATA_LOSS"),
        *("DISK_FULL", "FETCH_FAILED", "GRANT_REFUSED"),
        *("OUT_OF_MEMORY", "SEAL_REFUSED", "STORE_DOWN"),
        *("STORE_TIMEOUT", "WRONG_BASE"),
    }
)
# Reason of a worker that could not read a job. The next attempt is sealed anew, which even the same worker may open.
SEAL_REFUSED = "SEAL_REFUSED"
# Reason that the client gets of a request that kills engines.
POISON = "POISON_REQUEST"


class Dispatcher:
    """The jobs that one router owns.

    `queue_of` returns the queue of a model in a cell, `place` a job's placement there; `why_unservable` the error that
    ends a job which no live worker can take, or None.
    """

    def __init__(
        self,
        queue_of: Callable[[str, str], JobQueue],
        place: Callable[[Job, str], Placement],
        metrics: RouterMetrics | None = None,
        timing: DispatchTiming | None = None,
        links: WorkerLinks | None = None,
        cells: Cells | None = None,
        why_unservable: Callable[[Job], CallError | None] = lambda job: None,
    ) -> None:
        self._queue_of = queue_of
        self._place = place
        self._metrics = metrics or RouterMetrics()
        self._timing = timing or DispatchTiming()
        self._jobs: dict[str, RoutedJob] = {}
        self._links = links or WorkerLinks(self._timing)
        self._cells = cells or Cells()
        self._outbox = Outbox(queue_of, place, self._cells, self._timing, self._metrics)
        self._why_unservable = why_unservable
        # Since when no live worker can take a job, and since when a waiting job should be in another cell.
        self._unservable: dict[str, float] = {}
        self._stranded: dict[str, float] = {}
        # Looks into the queues of models and cells that are under way.
        self._looking: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._rounds = ReaderRounds()
        self._grace_periods: set[asyncio.Task[None]] = set()

    @property
    def jobs(self) -> Iterable[RoutedJob]:
        """Return the jobs that wait or run now."""
        return tuple(self._jobs.values())

    async def dispatch(self, job: Job, asked: Asked | None = None) -> RoutedJob:
        """Reserve what a new job asks for and put it into the queue; own it till `release`.

        In one step, where the queue `admits` the job. Raises CallError, and what Ledger.reserve does.
        """
        cell, reservation = self._cells.choose(job), None
        if asked is not None and not self._queue_of(job.model, cell).admits(job, asked):
            reservation, asked = await asked.reserve(), None
        check_weighted_sets(job, (other.job for other in self._jobs.values()))
        routed = self._jobs[job.job_id] = RoutedJob(job, self._rounds)
        routed.reservation = reservation
        try:
            routed.placement = self._place(job, cell)
            await self._enqueue(routed, asked)
        except (LedgerUnreadyError, QuotaReachedError):  # the queue does not have it
            self._jobs.pop(job.job_id).release()
            raise
        except BaseException as error:
            self.release(routed)
            if isinstance(error, (asyncio.CancelledError, Unavailable)):  # Redis may get the job after its removal
                self._finish_later(routed)
            raise
        routed.enqueued(job.attempt)
        self._metrics.cell_jobs.labels(job.model, routed.placement.cell).inc()
        self._outbox.warm(job, routed.placement)
        return routed

    def _finish_later(self, routed: RoutedJob) -> None:
        """Take a job out of its cell's queue once no enqueue can get there any more."""
        cell = routed.placement.cell
        asyncio.get_running_loop().call_later(self._timing.late_enqueue_s, self._outbox.finish, routed.job, cell)

    async def _enqueue(self, routed: RoutedJob, asked: Asked | None) -> None:
        """Put a new job into the queue, once that is reached. Raises CallError, and what Ledger.reserve does."""
        job = routed.job
        try:
            with self._metrics.enqueue_time.time():
                await self._enqueue_once_reached(routed, asked)
        except REFUSALS as error:
            if isinstance(error, QuarantinedError):
                self._metrics.quarantined.inc()
            raise refusal(error, job.tenant) from error
        except REDIS_DOWN as error:
            log.warning("the queue does not answer: %r", error, extra=fields(job_id=job.job_id))
            raise Unavailable("the queue does not answer", reason="QUEUE_DOWN") from error

    async def _enqueue_once_reached(self, routed: RoutedJob, asked: Asked | None) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time() + self._timing.enqueue_s - self._timing.pause_s
        while True:
            queue = self._queue_of(routed.job.model, routed.placement.cell)
            try:
                if asked is None:
                    return await queue.enqueue(routed.job, routed.placement)
                routed.reservation = await queue.admit(routed.job, routed.placement, asked)
                return None
            except REDIS_DOWN as error:
                # The ledger of a job that asks is on the same server.
                if asked is None and self._place_elsewhere(routed):
                    continue
                if not isinstance(error, RedisConnectionError) or loop.time() > last:
                    raise
            await asyncio.sleep(self._timing.pause_s)

    def _place_elsewhere(self, routed: RoutedJob) -> bool:
        """Place a job, whose cell's Redis does not answer, in another cell; False: there is none."""
        self._cells.failed(former := routed.placement.cell)
        cell = self._cells.another(routed.job, former)
        if cell is None:
            return False
        self._finish_later(routed)
        routed.placement = self._place(routed.job, cell)
        return True

    def release(self, routed: RoutedJob) -> None:
        """Remove a job from the queue, or cancel it at its worker."""
        del self._jobs[routed.job.job_id]
        routed.release()
        if routed.link is None:
            self._outbox.finish(routed.job, routed.placement.cell)
        elif not routed.finished_by_worker:
            routed.link.cancel(routed.job.job_id, routed.job.attempt)

    def bound_to(self, job_id: str, attempt: int) -> str:
        """Return the incarnation that an attempt is bound to; empty where it is not current, or bound to none."""
        routed = self._jobs.get(job_id)
        return "" if routed is None or routed.link is None or routed.job.attempt != attempt else routed.link.incarnation

    # Messages of workers

    def link_up(self, link: WorkerLink, holds: Sequence[tuple[str, int]]) -> None:
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

    def link_down(self, link: WorkerLink) -> None:
        """Note that a link broke: its worker has a moment to come back, then its jobs go on elsewhere."""
        if self._links.down(link):
            task = asyncio.get_running_loop().create_task(self._wait_for_link(link.incarnation))
            self._grace_periods.add(task)
            task.add_done_callback(self._grace_periods.discard)

    async def _wait_for_link(self, incarnation: str) -> None:
        await asyncio.sleep(self._timing.link_grace_s)
        if incarnation not in self._links.incarnations:
            self._redispatch_jobs_of({incarnation})

    def receive_claims(self, link: WorkerLink, jobs: Sequence[tuple[str, int]]) -> None:
        """Bind the jobs that a worker has claimed."""
        for job_id, attempt in jobs:
            self._bind(link, job_id, attempt)

    def receive_frame(self, link: WorkerLink, frame: Frame) -> None:
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
            link.ack(frame.job_id, frame.attempt)
            if not self._try_elsewhere(routed, link, frame.failure):
                routed.fail(frame.failure)
        elif frame.finish is not None and routed.finished_by_worker:
            link.ack(frame.job_id, frame.attempt)

    def _bind(self, link: WorkerLink, job_id: str, attempt: int) -> RoutedJob | None:
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
        self._end_unservable()
        self._leave_cells()

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

    def _try_elsewhere(self, routed: RoutedJob, link: WorkerLink, failure: CallError) -> bool:
        """Dispatch a job again that its worker could not serve; return False where no other worker is left for it."""
        job, cell = routed.job, routed.placement.cell
        if failure.reason not in WORKERS_OWN:
            return False
        tried = replace(job, failed_at=(*job.failed_at, link.worker_id))
        is_left = self._place(tried, cell).prefer or self._cells.fits_elsewhere(tried, cell)
        has_others = len(tried.failed_at) < WORKERS_TRIED and bool(is_left)
        if not has_others and failure.reason != SEAL_REFUSED:
            return False
        message = "worker %s can't serve a job (%s); it is dispatched again"
        log.warning(message, link.worker_id, failure.reason, extra=fields(job_id=job.job_id))
        self._metrics.redispatches.labels(RETURNED).inc()
        if has_others:
            routed.job = tried
        self._redispatch(routed)
        return True

    def _redispatch(self, routed: RoutedJob, *, blamed: bool = False) -> None:
        if routed.late:
            routed.fail(DeadlinePassed("the deadline passed before the answer's end"))
            return
        routed.next_attempt(blamed=blamed)
        self._outbox.enqueue(routed)

    # Jobs that wait

    async def redispatch_missing(self) -> None:
        """Look into the queue: dispatch missing jobs again, end displaced ones, renew seals; never returns."""
        async with asyncio.TaskGroup() as looks:
            while True:
                await asyncio.sleep(self._timing.look_s)
                queued: dict[tuple[str, str], list[RoutedJob]] = {}
                for routed in self.jobs:
                    if routed.state in _IN_QUEUE:
                        queued.setdefault((routed.job.model, routed.placement.cell), []).append(routed)
                for place, jobs in queued.items():
                    # The look into a cell that does not answer takes long, and delays no other cell's.
                    if place not in self._looking or self._looking[place].done():
                        self._looking[place] = looks.create_task(self._look_at(*place, jobs))

    async def _look_at(self, model: str, cell: str, jobs: Sequence[RoutedJob]) -> None:
        try:
            queue = self._queue_of(model, cell)
            attempts = [(routed.job.job_id, routed.job.attempt) for routed in jobs]
            states = await queue.look_up(attempts)
            self._take(jobs, attempts, states)
            await self._renew_seals(queue, jobs)
        except REDIS_DOWN:
            return
        except Exception:  # the next look may succeed, and other jobs need it
            log.exception("could not look for missing jobs of %s", model)

    def _take(
        self, jobs: Sequence[RoutedJob], attempts: Sequence[tuple[str, int]], states: Sequence[QueueState]
    ) -> None:
        now, missing = time.monotonic(), list[str]()
        for routed, (_, attempt), state in zip(jobs, attempts, states, strict=True):
            if state is QueueState.DISPLACED:
                self._end_displaced(routed, attempt)
            elif routed.looked_up(waiting=state is QueueState.WAITS, now=now) >= self._grace_s(routed):
                missing.append(routed.job.job_id)
                routed.unclaimed += 1
                self._redispatch(routed)
        if missing:
            self._metrics.redispatches.labels(UNCLAIMED).inc(len(missing))
            message = "%d jobs were claimed and never bound; they are dispatched again"
            log.warning(message, len(missing), extra=fields(job_id=missing[0]))

    async def _renew_seals(self, queue: JobQueue, jobs: Sequence[RoutedJob]) -> None:
        """Seal the jobs anew that have waited for long, some in each look; a worker refuses a seal that is too old."""
        now = time.monotonic()
        due = [one for one in jobs if one.state is JobState.QUEUED and now - one.sealed_at >= self._timing.seal_s]
        due = due[:_RENEWALS_PER_LOOK]
        await asyncio.gather(*(queue.renew(routed.job, routed.placement) for routed in due))
        for routed in due:
            routed.sealed_at = now

    def _grace_s(self, routed: RoutedJob) -> float:
        """Return for how many seconds a job may be missing: doubled after each attempt that was never bound.

        At a fixed time late reports of an overloaded worker or link would make attempts, which add to the overload.
        """
        return self._timing.claim_grace_s * (1 << min(routed.unclaimed, _GRACE_DOUBLINGS))

    def _end_displaced(self, routed: RoutedJob, attempt: int) -> None:
        if routed.job.attempt == attempt and routed.state in _UNBOUND:
            self._metrics.displaced.inc()
            routed.fail(queue_full(routed.job.tenant, "a tenant that uses less of it took the place of this request"))

    def _end_unservable(self) -> None:
        """End the jobs that no live worker has been able to take for a while.

        One look is not enough: a worker that restarts is missing for a moment.
        """
        now, unservable = time.monotonic(), dict[str, float]()
        for routed in self.jobs:
            error = self._why_unservable(routed.job) if routed.state in _UNBOUND else None
            if error is None:
                continue
            since = unservable[routed.job.job_id] = self._unservable.get(routed.job.job_id, now)
            if now - since >= self._timing.unservable_grace_s:
                log.warning("a job ends: %s", error, extra=fields(job_id=routed.job.job_id))
                self._metrics.unservable.labels(error.reason).inc()
                routed.fail(error)
        self._unservable = unservable

    def _leave_cells(self) -> None:
        """Dispatch waiting jobs again whose cell is drained or away, or has no worker for them: another cell has."""
        now, stranded, moved = time.monotonic(), dict[str, float](), 0
        for routed in self.jobs:
            if routed.state not in _IN_QUEUE:
                continue
            after_s = self._cells.leaves_after_s(routed.job, routed.placement.cell, self._timing.unservable_grace_s)
            if after_s is None:
                continue
            since = stranded[routed.job.job_id] = self._stranded.get(routed.job.job_id, now)
            if now - since >= after_s and moved < _MOVED_PER_LOOK:
                moved += 1
                routed.leave_cell()
                self._redispatch(routed)
        self._stranded = stranded
        if moved:
            self._metrics.redispatches.labels(MOVED).inc(moved)
            log.warning("%d waiting jobs go to another cell", moved)

    @property
    def waiting(self) -> Iterable[tuple[Job, str]]:
        """Return the jobs that no worker has, each with its cell."""
        return ((routed.job, routed.placement.cell) for routed in self._jobs.values() if routed.state in _UNBOUND)

    async def drain_tasks(self) -> None:
        """Wait for what was begun in the background, up to a timeout: Redis may be gone for good."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timing.drain_s):
                while self._grace_periods:
                    await asyncio.gather(*self._grace_periods, return_exceptions=True)
                await self._outbox.drain_tasks()
