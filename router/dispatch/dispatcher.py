"""Dispatch: which attempt of which job is whose, and the one recovery operation.

A worker that dies, drains or loses its link, a claim that never shows: all are attempt + 1, with the prompt and the ids
emitted so far. A frame is taken only from the incarnation that the job's current attempt is bound to.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, suppress
from typing import Any

from broker.connection import REDIS_DOWN
from broker.messages import Job
from broker.queue import DeadlineUnattainableError, JobQueue, QueueFullError
from broker.terms import Placement
from router.dispatch.outbox import Outbox
from router.dispatch.reader_rounds import ReaderRounds
from router.dispatch.routed_job import Frame, Link, RoutedJob
from router.metrics import LOST, RETURNED, UNCLAIMED, RouterMetrics
from rpc.errors import DeadlinePassed, Exhausted, Internal, Unavailable
from telemetry.logging import fields

log = logging.getLogger(__name__)

# A broken link is the first sign of a death; this is how long the worker has to come back.
LINK_GRACE_S = 0.2
# A job that left the queue and was not bound in this time is dispatched again.
CLAIM_GRACE_S = 1.0
# So long a worker's key must have been away: two beats.
MISSING_S = 1.0
WATCH_S = 0.25
# So long a router's end waits for what is still to be told to Redis.
SETTLE_S = 5.0
# What a client is told whose request kills the engines.
POISON = "POISON_REQUEST"
# When a client that was refused is to come back: about, so that they do not all come at once.
FULL_RETRY_S = 1.0


class Dispatcher:
    """The jobs that this router owns."""

    def __init__(
        self,
        queue_of: Callable[[str], JobQueue],
        place: Callable[[Job], Placement],
        metrics: RouterMetrics | None = None,
    ) -> None:
        self._queue_of = queue_of
        self._place = place
        self._metrics = metrics or RouterMetrics()
        self._jobs: dict[str, RoutedJob] = {}
        # Since when an incarnation that has jobs of ours has not been among the living.
        self._missing: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox = Outbox(queue_of, place, self._owns)
        self._rounds = ReaderRounds()
        # The live link of each incarnation.
        self._links: dict[str, Link] = {}

    @property
    def jobs(self) -> Iterable[RoutedJob]:
        """The jobs that run or wait now."""
        return tuple(self._jobs.values())

    def _owns(self, routed: RoutedJob) -> bool:
        return self._jobs.get(routed.job.job_id) is routed

    @asynccontextmanager
    async def dispatch(self, job: Job) -> AsyncIterator[RoutedJob]:
        """Dispatch a job; on leaving, whatever the reason, nothing of it is left queued or running.

        Raises Exhausted or Unavailable.
        """
        routed = self._jobs[job.job_id] = RoutedJob(job, self._rounds)
        try:
            # Nobody is to miss it meanwhile and dispatch it a second time, past the queue's limits.
            routed.dispatching = True
            await self._admit(job)
            routed.dispatching = False
            if routed.job.attempt > job.attempt:  # a worker had it and lost it before we knew that it was in
                self._outbox.enqueue(routed)
            yield routed
        finally:
            del self._jobs[job.job_id]
            self._release(routed)

    async def _admit(self, job: Job) -> None:
        try:
            with self._metrics.enqueue_time.time():
                await self._queue_of(job.model).enqueue(job, self._place(job))
        except QueueFullError as error:
            whose = f"tenants/{error.whose}/queue" if error.whose else "queue"
            after_s = random.uniform(0.5, 1.5) * FULL_RETRY_S
            raise Exhausted(whose, f"the queue is full: {error}", retry_after_s=after_s, reason="QUEUE_FULL") from error
        except DeadlineUnattainableError as error:
            message, after_s = f"the deadline can't be met: {error}", random.uniform(0.5, 1.0) * error.wait_ms / 1e3
            raise Exhausted("deadline", message, retry_after_s=after_s, reason="DEADLINE_UNATTAINABLE") from error
        except REDIS_DOWN as error:
            log.warning("the queue does not answer: %r", error, extra=fields(job_id=job.job_id))
            raise Unavailable("the queue does not answer", reason="QUEUE_DOWN") from error

    def _release(self, routed: RoutedJob) -> None:
        if routed.link is None:
            self._outbox.finish(routed.job)
        elif not routed.finished_by_worker:
            routed.link.cancel(routed.job.job_id, routed.job.attempt)

    # What the relay tells

    def link_up(self, link: Link, holds: Sequence[tuple[str, int]]) -> None:
        """A worker is there, perhaps again: it goes on with what is still its own and drops the rest."""
        self._links[link.incarnation] = link
        for job_id, attempt in holds:
            routed = self._claimed(link, job_id, attempt)
            for index, choice in enumerate(routed.choices if routed else ()):
                if choice.ended:
                    link.cancel(job_id, attempt, index)
                else:
                    link.rewind(job_id, attempt, index, len(choice.emitted))
        held = {job_id for job_id, _ in holds}
        for routed in self._bound_to({link.incarnation}):
            if routed.job.job_id not in held:
                self._metrics.redispatches.labels(LOST).inc()
                self._redispatch(routed)

    def link_down(self, link: Link) -> None:
        """A link broke: its worker gets a moment to come back, then its jobs go on elsewhere."""
        if self._links.get(link.incarnation) is link:
            del self._links[link.incarnation]
            self._spawn(self._lapse(link))

    async def _lapse(self, link: Link) -> None:
        await asyncio.sleep(LINK_GRACE_S)
        if link.incarnation in self._links:
            return
        self._go_on({link.incarnation})

    def living(self, incarnations: AbstractSet[str]) -> None:
        """Who lives, by their keys in Redis: the second sign of a death, for workers whose link stays open.

        One look is none: a Redis that has just lost its data knows nobody until the next beats.
        """
        now = time.monotonic()
        bound = {routed.link.incarnation for routed in self._jobs.values() if routed.link is not None}
        self._missing = {missing: self._missing.get(missing, now) for missing in bound - incarnations}
        self._go_on({missing for missing, since in self._missing.items() if now - since >= MISSING_S})

    def _go_on(self, lost: AbstractSet[str]) -> None:
        jobs = self._bound_to(lost)
        if jobs:
            self._metrics.workers_lost.inc(len({routed.link.incarnation for routed in jobs if routed.link}))
            self._metrics.redispatches.labels(LOST).inc(len(jobs))
            log.warning("lost: worker incarnations %s; %d jobs go on elsewhere", ", ".join(sorted(lost)), len(jobs))
        for routed in jobs:
            self._redispatch(routed)

    def _bound_to(self, incarnations: AbstractSet[str]) -> list[RoutedJob]:
        jobs = self._jobs.values()
        return [t for t in jobs if t.link is not None and t.link.incarnation in incarnations and not t.ended]

    def claims(self, link: Link, jobs: Sequence[tuple[str, int]]) -> None:
        """A worker says that it has claimed these jobs."""
        for job_id, attempt in jobs:
            self._claimed(link, job_id, attempt)

    def _claimed(self, link: Link, job_id: str, attempt: int) -> RoutedJob | None:
        """The routed, if this link has its current attempt now; the worker is told to stop it otherwise."""
        routed = self._jobs.get(job_id)
        if routed is not None and routed.job.attempt == attempt and not routed.ended and routed.bind(link):
            return routed
        link.cancel(job_id, attempt)
        return None

    def frame(self, link: Link, frame: Frame) -> None:
        """Tokens, or the end, of a job."""
        routed = self._claimed(link, frame.job_id, frame.attempt)
        if routed is None:
            self._metrics.stale.inc()
            return
        if frame.choice >= len(routed.choices):
            log.warning("worker %s: job %s has no choice %d", link.worker_id, frame.job_id, frame.choice)
        elif frame.returned:
            # With a gap it goes on from what is here: that costs a little work and no wait.
            routed.accept(frame)
            link.ack(frame.job_id, frame.attempt)
            self._returned(routed, struck=frame.struck)
        elif not routed.accept(frame):
            self._metrics.rewinds.inc()
            emitted = routed.choices[frame.choice].emitted
            link.rewind(frame.job_id, frame.attempt, frame.choice, len(emitted))
        elif frame.failure is not None:
            routed.fail(frame.failure)
            link.ack(frame.job_id, frame.attempt)
        elif routed.finished_by_worker:
            link.ack(frame.job_id, frame.attempt)

    # Recovery

    def _returned(self, routed: RoutedJob, *, struck: bool) -> None:
        """A worker gave the job back: it goes on elsewhere, unless it killed an engine that had nothing else."""
        if not (struck and routed.job.suspect):
            self._metrics.redispatches.labels(RETURNED).inc()
            self._redispatch(routed, struck=struck)
            return
        self._metrics.poisoned.inc()
        deaths = routed.job.strikes + 1
        known = fields(job_id=routed.job.job_id, tenant=routed.job.tenant)
        log.error("a job ends: %d engines died of it, the last one while it was alone", deaths, extra=known)
        routed.fail(Internal(f"{deaths} engines died of this request, the last one while it ran alone", reason=POISON))
        self._outbox.bury(routed, POISON)

    def _redispatch(self, routed: RoutedJob, *, struck: bool = False) -> None:
        if routed.late:
            routed.fail(DeadlinePassed("the deadline passed before the answer's end"))
            return
        routed.next_attempt(struck=struck)
        if not routed.dispatching:
            self._outbox.enqueue(routed)

    async def watch(self) -> None:
        """Forever: dispatch again what left the queue and never showed up at a worker."""
        while True:
            await asyncio.sleep(WATCH_S)
            unbound: dict[str, list[RoutedJob]] = {}
            for routed in self._jobs.values():
                if routed.link is None and not routed.ended and not routed.dispatching:
                    unbound.setdefault(routed.job.model, []).append(routed)
            for model, jobs in unbound.items():
                try:
                    waiting = await self._queue_of(model).waiting([(t.job.job_id, t.job.attempt) for t in jobs])
                    self._check_missing(jobs, waiting)
                except REDIS_DOWN:
                    continue
                except Exception:  # the next look may go well, and other jobs need it
                    log.exception("the jobs of %s could not be looked after", model)

    def _check_missing(self, jobs: Sequence[RoutedJob], waiting: Sequence[bool]) -> None:
        now = time.monotonic()
        for routed, waits in zip(jobs, waiting, strict=True):
            if waits or routed.link is not None or routed.dispatching or not self._owns(routed):
                routed.missing_since = None
            elif routed.missing_since is None:
                routed.missing_since = now
            elif now - routed.missing_since >= CLAIM_GRACE_S:
                known = fields(job_id=routed.job.job_id, attempt=routed.job.attempt)
                log.warning("a job was claimed and never bound", extra=known)
                self._metrics.redispatches.labels(UNCLAIMED).inc()
                self._redispatch(routed)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain_tasks(self) -> None:
        """Wait until what was begun in the background is done, SETTLE_S at most: Redis may be gone for good."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while self._tasks:
                    await asyncio.gather(*self._tasks, return_exceptions=True)
                await self._outbox.drain_tasks()
