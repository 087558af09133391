"""Queue operations that no call waits for: attempts that go in again, ended jobs that go out, dead letters.

A bounded number runs at once, in their order: a worker that is lost with many jobs, or a Redis that comes back, must
not meet them all in the same moment. While Redis does not answer they are tried again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from loraplex.contracts.broker.commands import COMMAND_TTL_MS, Command, Verb
from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.homes import Roster, WorkerLoad
from loraplex.contracts.broker.messages import AdapterRequest, DeadJob, Job, WorkerState
from loraplex.contracts.broker.queue import (
    DeadlineUnattainableError,
    JobQueue,
    QuarantinedError,
    QueueFullError,
    RedisFullError,
)
from loraplex.contracts.broker.terms import DEATHS_MEMORY_MS, NO_KEY, KeyTerms, Placement
from loraplex.router.dispatch.cells import WORKERS_TRIED, Cells
from loraplex.router.dispatch.links import DispatchTiming
from loraplex.router.dispatch.routed_job import JobState, RoutedJob
from loraplex.router.metrics import RouterMetrics
from loraplex.runtime.rpc.errors import CallError, Exhausted, Internal
from loraplex.runtime.rpc.shares import spread
from loraplex.runtime.telemetry.logging import fields

log = logging.getLogger(__name__)

MIB = 1 << 20

# Maximum number of warms that a router remembers: it does not ask a worker again while it may still load the adapter.
_WARMS_LIMIT = 4_096


@dataclass(eq=False)
class Placer:
    """Places jobs among the workers that serve their model in a cell.

    `serving`: by model, base digest and cell. `homes_of`: by model, cell and adapter's digest.
    `fits_elsewhere`: whether another cell can take a job of this one.
    """

    serving: Callable[[str, str, str], Sequence[WorkerState]]
    weight_of: Callable[[str], float]
    adapter_mib_tokens: float
    queue_share_of: Callable[[str], float] = lambda tenant: 1.0
    calling_key_terms: Callable[[], KeyTerms] = lambda: NO_KEY
    homes_of: Callable[[str, str, str], int] = lambda model, cell, digest: 1
    fits_elsewhere: Callable[[Job, str], bool] = lambda job, cell: False
    _turns: Iterator[int] = field(init=False, default_factory=count)
    # The workers that could have the last job of each model in each cell.
    _rosters: dict[tuple[str, str], tuple[tuple[WorkerState, ...], Roster]] = field(init=False, default_factory=dict)
    # Time until which an adapter is not warmed again, by incarnation and digest, the oldest first.
    _warms: dict[tuple[str, str], float] = field(init=False, default_factory=dict)

    def place(self, job: Job, cell: str) -> Placement:
        """Return the placement of a job in a cell."""
        weight, share = self.weight_of(job.tenant), self.queue_share_of(job.tenant)
        # Later attempts are made by no call; the outbox gives them the first one's terms.
        key = self.calling_key_terms() if job.attempt == 1 else NO_KEY
        if job.adapter is None and not job.failed_at:
            return Placement(weight, queue_share=share, key=key, cell=cell)
        able = tuple(
            state
            for state in self.serving(job.model, job.base_digest, cell)
            if state.max_rank >= job.rank and state.max_tokens >= job.tokens
        )
        former = self._rosters.get((job.model, cell))
        if former is None or former[0] != able:  # workers of another census, or of another size
            former = self._rosters[job.model, cell] = able, Roster(map(_load_of, able))
        digest, weight_bytes = (job.adapter.digest, job.adapter.weight_bytes) if job.adapter else ("", 0)
        homes = self.homes_of(job.model, cell, digest)
        preference = former[1].preferred(digest, homes, next(self._turns), job.failed_at)
        warm = tuple(
            state.incarnation
            for state in (able if preference.to_warm else ())
            if state.worker_id in preference.to_warm and self._is_due(state.incarnation, digest)
        )
        load_tokens = weight_bytes / MIB * self.adapter_mib_tokens
        has_others = len(preference.workers) > 1 or self.fits_elsewhere(job, cell)
        last_try = not has_others or len(job.failed_at) + 1 >= WORKERS_TRIED
        return Placement(weight, preference.workers, load_tokens, share, key, cell, warm=warm, last_try=last_try)

    def _is_due(self, incarnation: str, digest: str) -> bool:
        """Tell whether a worker is to be asked for an adapter now, and not again while a command may wait for it."""
        now = time.monotonic()
        while self._warms and (len(self._warms) >= _WARMS_LIMIT or next(iter(self._warms.values())) <= now):
            del self._warms[next(iter(self._warms))]
        if (incarnation, digest) in self._warms:
            return False
        self._warms[incarnation, digest] = now + COMMAND_TTL_MS / 1e3
        return True


def _load_of(state: WorkerState) -> WorkerLoad:
    used, has_free_slot = state.rows_running + state.rows_waiting, state.slots_used < state.slots_total
    adapters = frozenset(state.adapters)
    return WorkerLoad(state.worker_id, used, state.rows_limit, adapters, has_free_slot, state.fetch_fails)


# Reason that the client gets while jobs of its tenant and adapter are refused because they killed engines.
QUARANTINED = "QUARANTINED"
# Mean time in seconds after which a refused client is to call again; each gets its own, so that they do not all come
# at once.
FULL_RETRY_S = 1.0

REFUSALS = (QueueFullError, DeadlineUnattainableError, QuarantinedError)


def refusal(error: QueueFullError | DeadlineUnattainableError | QuarantinedError, tenant: str) -> CallError:
    """Return the error of a call of this tenant whose job was refused."""
    if isinstance(error, RedisFullError):
        return redis_full(str(error))
    if isinstance(error, QueueFullError):
        return queue_full(error.tenant, str(error), error.key)
    if isinstance(error, QuarantinedError):
        subject, after_s = f"tenants/{tenant}/quarantine", error.left_ms / 1e3
        return Exhausted(subject, str(error), retry_after_s=after_s, reason=QUARANTINED)
    after_s = random.uniform(0.5, 1.0) * error.wait_ms / 1e3
    message = f"the deadline can't be met: {error}"
    return Exhausted("deadline", message, retry_after_s=after_s, reason="DEADLINE_UNATTAINABLE")


def queue_full(tenant: str, why: str, key: str = "") -> Exhausted:
    """Return the error of a job that has no place in the queue; without tenant and key: it is not a limit of theirs."""
    subject = f"tenants/{tenant}/queue" if tenant else f"keys/{key}/quotas/queue_share" if key else "queue"
    after_s = spread(FULL_RETRY_S)
    return Exhausted(subject, f"the queue is full: {why}", retry_after_s=after_s, reason="QUEUE_FULL")


def redis_full(message: str = "Redis is out of memory") -> Exhausted:
    """Return the error of a call for which Redis has no memory: an operator is to raise its maxmemory."""
    return Exhausted("redis", message, retry_after_s=spread(FULL_RETRY_S), reason="REDIS_FULL")


# Maximum number of operations at once, of each kind: half of the connections to Redis, since new requests need some.
AT_ONCE = 8
# Maximum number of faults that no outage explains before an operation is given up.
FAULTS_LIMIT = 5

Operation = Callable[[], Awaitable[None]]


@dataclass(eq=False)
class Outbox:
    """The queue operations of one dispatcher. What becomes of an attempt is reported to its RoutedJob."""

    queue_of: Callable[[str, str], JobQueue]
    place: Callable[[Job, str], Placement]
    cells: Cells
    timing: DispatchTiming
    metrics: RouterMetrics

    def __post_init__(self) -> None:
        """Begin without operations."""
        self._enqueues = asyncio.Semaphore(AT_ONCE)
        # Removals must not wait for enqueues: the memory of Redis may be full. Nor for those of a cell that is away.
        self._removals = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(AT_ONCE))
        self._tasks: set[asyncio.Task[None]] = set()

    def enqueue(self, routed: RoutedJob) -> None:
        """Put the job's current attempt into the queue, unless a claim or the job's end makes it obsolete before."""
        attempt = routed.job.attempt
        self._start(self._enqueues, lambda: self._enqueue(routed, attempt))

    async def _enqueue(self, routed: RoutedJob, attempt: int) -> None:
        job = routed.job

        async def enqueue() -> None:
            key, begun, former = routed.placement.key, routed.claimed_at is not None, routed.placement.cell
            cell = self.cells.choose(job, former)
            routed.placement = replace(self.place(job, cell), key=key, begun=begun)
            if former and former != cell:  # an earlier attempt, or a try of this one, may wait there
                self.finish(job, former)
            try:
                await self.queue_of(job.model, cell).enqueue(job, routed.placement)
            except REDIS_DOWN:
                self.cells.failed(cell)
                raise
            self.metrics.cell_jobs.labels(job.model, cell).inc()
            self.warm(job, routed.placement)

        try:
            what = f"enqueueing job {job.job_id}, attempt {attempt}"
            await self._persist(what, enqueue, due=lambda: routed.awaits_enqueue(attempt))
            routed.enqueued(attempt)
        except QuarantinedError as quarantined:
            self.metrics.quarantined.inc()
            routed.enqueue_failed(attempt, refusal(quarantined, job.tenant))
        except Exception:  # logged already
            error = Internal("the request could not be dispatched again", reason="DISPATCH_FAILED")
            routed.enqueue_failed(attempt, error)
        if routed.state is JobState.RELEASED and routed.link is None:  # while this was under way
            self.finish(routed.job, routed.placement.cell)

    def finish(self, job: Job, cell: str) -> None:
        """Take a job out of a cell's queue. Where that fails, the router cancels it at the worker that claims it."""

        async def finish() -> None:
            await self.queue_of(job.model, cell).finish(job.job_id, job.attempt)

        self._remove(cell, f"removing job {job.job_id}", finish)

    def warm(self, job: Job, placement: Placement) -> None:
        """Have homes of the job's adapter load it that lack it."""
        if job.adapter is None or not placement.warm:
            return
        command = Command(Verb.WARM, AdapterRequest(job.adapter, job.tenant))

        async def warm() -> None:
            for incarnation in placement.warm:
                await self.queue_of(job.model, placement.cell).commands.send(incarnation, command)

        self._remove(placement.cell, f"warming {job.adapter.revision}", warm)

    def add_dead_letter(self, routed: RoutedJob, reason: str) -> None:
        """Keep a dead letter of a job, with the reason that its client gets."""
        dead = _dead_job(routed, reason)

        async def add() -> None:
            await self.queue_of(dead.model, routed.placement.cell).dead.push(dead)

        self._remove(routed.placement.cell, f"adding the dead letter of job {dead.job_id}", add)

    def record_death(self, job: Job) -> None:
        """Record in all cells that engines died of a job, for the quarantine of its tenant and adapter.

        A cell that is away gets to know it when it is back.
        """
        for cell in self.cells.names:
            self._record_death(job, cell)

    def _record_death(self, job: Job, cell: str) -> None:
        adapter, died_at = job.adapter.digest if job.adapter else "", time.monotonic()
        until = died_at + DEATHS_MEMORY_MS / 1e3

        async def record() -> None:
            age_ms, queue = round((time.monotonic() - died_at) * 1e3), self.queue_of(job.model, cell)
            refused_ms = await queue.record_death(job.tenant, adapter, job.job_id, age_ms)
            message = "jobs of tenant %s with adapter %s are refused for %.0f s: they kill engines"
            log.error(message, job.tenant, adapter or "(none)", refused_ms / 1e3, extra=fields(tenant=job.tenant))

        what = f"recording the death of job {job.job_id}"
        # Without a bound: deaths are few, and nothing waits behind one that waits for a cell.
        self._start(asyncio.Semaphore(), lambda: self._persist(what, record, due=lambda: time.monotonic() < until))

    def _remove(self, cell: str, what: str, operation: Operation) -> None:
        until = time.monotonic() + self.timing.finish_s
        self._start(self._removals[cell], lambda: self._persist(what, operation, due=lambda: time.monotonic() < until))

    def _start(self, slots: asyncio.Semaphore, operation: Operation) -> None:
        """Run an operation once a slot is free, after those before it."""

        async def run() -> None:
            async with slots:
                try:
                    await operation()
                except Exception:
                    log.exception("a queue operation failed")

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain_tasks(self) -> None:
        """Wait until every operation is done."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _persist(self, what: str, operation: Operation, *, due: Callable[[], bool]) -> None:
        """Run an operation until it succeeds, again and again while Redis does not answer or is full.

        Raises an error that no outage explains after FAULTS_LIMIT of them.
        """
        faults, logged = 0, False
        while due():
            try:
                return await operation()
            except QuarantinedError:
                raise
            except (*REDIS_DOWN, QueueFullError) as error:
                if not logged:
                    log.warning("%s waits for the queue: %r", what, error)
                logged = True
            except Exception:
                faults += 1
                log.exception("%s failed", what)
                if faults == FAULTS_LIMIT:
                    raise
            await asyncio.sleep(self.timing.pause_s)
        return None


def _dead_job(routed: RoutedJob, reason: str) -> DeadJob:
    job = routed.job
    return DeadJob(
        job_id=job.job_id,
        request_id=job.request_id,
        tenant=job.tenant,
        model=job.model,
        adapter_revision=job.adapter.revision if job.adapter else "",
        prompt_tokens=len(job.prompt_ids),
        completion_tokens=routed.emitted_tokens,
        attempts=job.attempt,
        reason=reason,
        died_at_ms=round(time.time() * 1e3),
    )
