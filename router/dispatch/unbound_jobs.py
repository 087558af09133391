"""Looks after the jobs that no worker has: finds those missing in the queue, and ends those that nobody can take."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from broker.connection import REDIS_DOWN
from broker.messages import Job
from broker.queue import JobQueue
from broker.terms import QueueState
from router.dispatch.job_state import JobState
from router.dispatch.refusals import queue_full
from router.dispatch.routed_job import RoutedJob
from router.dispatch.timing import DispatchTiming
from router.metrics import UNCLAIMED, RouterMetrics
from rpc.errors import CallError
from telemetry.logging import fields

log = logging.getLogger(__name__)

# Maximum number of jobs that are sealed anew in one look: each takes the event loop some 0.2 ms.
_RENEWALS_PER_LOOK = 32
# Maximum number of times that the time for which a job may be missing is doubled.
_GRACE_DOUBLINGS = 3
_UNBOUND = frozenset({JobState.ENQUEUEING, JobState.QUEUED, JobState.MISSING})


class UnboundJobs:
    """The jobs of one dispatcher that wait. `jobs` returns all its jobs; `redispatch` makes a job's next attempt.

    `why_unservable` returns the error that ends a job which no live worker can take, or None.
    """

    def __init__(
        self,
        queue_of: Callable[[str], JobQueue],
        jobs: Callable[[], Iterable[RoutedJob]],
        redispatch: Callable[[RoutedJob], None],
        why_unservable: Callable[[Job], CallError | None],
        metrics: RouterMetrics,
        timing: DispatchTiming,
    ) -> None:
        self._queue_of = queue_of
        self._jobs = jobs
        self._redispatch = redispatch
        self._why_unservable = why_unservable
        self._metrics = metrics
        self._timing = timing
        # Since when no live worker can take a job.
        self._unservable: dict[str, float] = {}

    async def look(self) -> None:
        """Look into the queue: dispatch missing jobs again, end displaced ones, renew seals; never returns."""
        while True:
            await asyncio.sleep(self._timing.look_s)
            queued: dict[str, list[RoutedJob]] = {}
            for routed in self._jobs():
                if routed.state in {JobState.QUEUED, JobState.MISSING}:
                    queued.setdefault(routed.job.model, []).append(routed)
            await asyncio.gather(*(self._look_at(model, jobs) for model, jobs in queued.items()))

    async def _look_at(self, model: str, jobs: Sequence[RoutedJob]) -> None:
        try:
            attempts = [(routed.job.job_id, routed.job.attempt) for routed in jobs]
            states = await self._queue_of(model).look_up(attempts)
            self._take(jobs, attempts, states)
            await self._renew_seals(self._queue_of(model), jobs)
        except REDIS_DOWN:
            return
        except Exception:  # the next look may succeed, and other jobs need it
            log.exception("could not look for missing jobs of %s", model)

    def _take(
        self, jobs: Sequence[RoutedJob], attempts: Sequence[tuple[str, int]], states: Sequence[QueueState]
    ) -> None:
        now = time.monotonic()
        for routed, (_, attempt), state in zip(jobs, attempts, states, strict=True):
            if state is QueueState.DISPLACED:
                self._end_displaced(routed, attempt)
            elif routed.looked_up(waiting=state is QueueState.WAITS, now=now) >= self._grace_s(routed):
                log_fields = fields(job_id=routed.job.job_id, attempt=routed.job.attempt)
                log.warning("a job was claimed and never bound", extra=log_fields)
                self._metrics.redispatches.labels(UNCLAIMED).inc()
                routed.unclaimed += 1
                self._redispatch(routed)

    async def _renew_seals(self, queue: JobQueue, jobs: Sequence[RoutedJob]) -> None:
        """Seal the jobs anew that have waited for long, some in each look; a worker refuses a seal that is too old."""
        now = time.monotonic()
        due = [one for one in jobs if one.state is JobState.QUEUED and now - one.sealed_at >= self._timing.seal_s]
        due = due[:_RENEWALS_PER_LOOK]
        await asyncio.gather(*(queue.renew(routed.job, routed.placement) for routed in due))
        for routed in due:
            routed.sealed_at = now

    def _grace_s(self, routed: RoutedJob) -> float:
        """Return for how many seconds a job may be missing: twice as long after each attempt that was never bound.

        An overloaded worker or link reports its claims late. At a fixed time each late report would make another
        attempt, and these attempts would add to the overload.
        """
        return self._timing.claim_grace_s * (1 << min(routed.unclaimed, _GRACE_DOUBLINGS))

    def _end_displaced(self, routed: RoutedJob, attempt: int) -> None:
        if routed.job.attempt == attempt and routed.state in _UNBOUND:
            self._metrics.displaced.inc()
            routed.fail(queue_full(routed.job.tenant, "a tenant that uses less of it took the place of this request"))

    def end_unservable(self) -> None:
        """End the jobs that no live worker has been able to take for a while; call it after each look at the workers.

        One look is not enough: a worker that restarts is missing for a moment.
        """
        now, unservable = time.monotonic(), dict[str, float]()
        for routed in self._jobs():
            error = self._why_unservable(routed.job) if routed.state in _UNBOUND else None
            if error is None:
                continue
            since = unservable[routed.job.job_id] = self._unservable.get(routed.job.job_id, now)
            if now - since >= self._timing.unservable_grace_s:
                log.warning("a job ends: %s", error, extra=fields(job_id=routed.job.job_id))
                self._metrics.unservable.labels(error.reason).inc()
                routed.fail(error)
        self._unservable = unservable
