"""The way in of a job: claims what this worker has room for, fetches its adapter, and hands it to the engine.

    queue ──claim──▶ accept ──▶ Add ──▶ engine
                        └──▶ wait until it may begin (a suspect) ──▶ fetch the adapter ──▶ Add ──▶ engine

A job waits for its adapter outside the engine, so that a slow store delays no other job. A claim carries this worker's
free rows and tokens, and the row that a tenant below its share may take: the engine takes that row from the tenant that
has most rows for its weight (worker.engine.scheduling.admission).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.messages import Capacity, Job, RowToShare
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import Claimed
from loraplex.runtime.rpc.tasks import retrieve_error
from loraplex.runtime.telemetry.logging import fields
from loraplex.worker.engine_api import EngineLimits, EngineStats, Failure
from loraplex.worker.io.adapters.fetch import AdapterFetcher, FetchFailedError, fetch_source
from loraplex.worker.io.engine_client import EngineProcess
from loraplex.worker.io.local_jobs import LocalJob, LocalJobs, LocalJobState
from loraplex.worker.io.metrics import WorkerMetrics
from loraplex.worker.io.relay.links import RouterLinks
from loraplex.worker.io.results import Results, TokenReports

log = logging.getLogger(__name__)


# Maximum seconds between two claims of an idle worker: a wake-up may be lost with its Redis.
IDLE_S = 1.0
# Maximum seconds between two claims without a free row while tenants could share one: they take jobs of tenants below
# their share. Others, each second, ask for adapters to prefetch and renew the worker's free rows in Redis.
FULL_S = 0.25
# Minimum seconds between two claims of a busy worker while jobs wait, and number of free rows that are claimed sooner:
# a claim of several rows costs Redis half as much a job.
PACE_S = 0.02
PACED_ROWS = 8
# Maximum seconds until a worker that has no room for what waits claims again: something that fits may have come.
FIT_S = 0.1
# Seconds until the next claim after Redis did not answer.
RETRY_S = 0.1
# Timeout in seconds for ending the wait of a claim: jobs that are to be given back must not wait for Redis.
END_WAIT_S = 0.2
# Seconds after which a job that still waits for its adapter lends its row to another job. A fetch from a healthy store
# is faster.
LATE_S = 0.5
# Seconds for which a job fetches its adapter again after a failure that may pass, and between two tries: a store that
# restarts is back by then.
FETCH_RETRY_S, FETCH_PAUSE_S = 15.0, 0.25
_MAY_PASS = frozenset({"UNAVAILABLE", "DATA_LOSS"})
# Number of claimed jobs in a row that this worker could not read, and others may, before it pauses; and the pause in
# seconds: it doubles with each such job after one.
UNREAD_LIMIT = 3
UNREAD_PAUSE_S, UNREAD_PAUSE_LIMIT_S = 1.0, 10.0


class Intake:
    """The claims of one engine session."""

    def __init__(
        self,
        base_digest: str,
        queue: JobQueue,
        engine: EngineProcess,
        fetcher: AdapterFetcher,
        results: Results,
        usage: TokenReports,
        metrics: WorkerMetrics,
    ) -> None:
        self._base_digest = base_digest
        self._queue = queue
        self._engine = engine
        self._fetcher = fetcher
        self._results = results
        self._links = results.links
        self._jobs = results.jobs
        self._usage = usage
        self._metrics = metrics
        self._claiming: asyncio.Task[Claimed] | None = None
        # Whether the claim that is under way waits in Redis for a job.
        self._waits = False
        # Tasks of the jobs between their claim and the engine.
        self._preparing: set[asyncio.Task[None]] = set()
        # The row to share after the last claim; the claim's time, and that of the last one without a free row.
        self._row_to_share: RowToShare | None = None
        self._claimed_at = self._full_claim_at = 0.0
        # Claimed jobs in a row that could not be read, and seconds of the next pause for that.
        self._unread, self._pause_s = 0, UNREAD_PAUSE_S
        # Called before and after a pause of the claims, with whether it begins.
        self.on_pause: Callable[[bool], Awaitable[None]] | None = None

    async def run(self) -> None:
        """Claim whatever there is room for; never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._claim_forever())
            tasks.create_task(self._follow_links())

    async def _follow_links(self) -> None:
        """End a claim's wait when a link comes up or is lost: it names the routers that had a link when it began."""
        change = self._links.next_change
        while True:
            await change.wait()
            change = self._links.next_change
            if self._waits:
                with contextlib.suppress(*REDIS_DOWN):  # then the claim fails as well
                    await self._queue.stop_waiting()

    async def _claim_forever(self) -> None:
        wait_s, freed = 0.0, False
        while True:
            capacity = await self._capacity_to_claim(at_once=wait_s > 0)
            change, link_change = self._jobs.next_change, self._links.next_change
            full = capacity.rows <= 0
            try:
                self._waits = wait_s > 0
                # Shielded: jobs that the queue has given away must come in even when the worker is told to stop.
                self._claiming = asyncio.create_task(self._claim(capacity, wait_s, freed=freed))
                self._claiming.add_done_callback(retrieve_error)
                claimed = await asyncio.shield(self._claiming)
            except REDIS_DOWN as error:
                log.warning("the queue does not answer: %s", error)
                await asyncio.sleep(RETRY_S)
                wait_s, freed = 0.0, False
                continue
            if self._unread >= UNREAD_LIMIT:
                await self._pause()
            self._fetcher.prefetch(claimed.adapter_requests)
            self._links.dial(claimed.unlinked)
            wait_s, freed = 0.0, False
            self._claimed_at = time.monotonic()
            # A full worker that got a job may get another at once.
            self._row_to_share = None if full and claimed.jobs else self._capacity().row_to_share
            self._full_claim_at = self._claimed_at if full else self._full_claim_at
            if claimed.unlinked and not full and not claimed.jobs:
                # Meanwhile wake-ups are left to workers that reach these routers.
                await one_is_set_within(claimed.hold_ms / 1e3 or FIT_S, change, link_change)
            elif self._is_idle(full, claimed):
                # The next claim is made at an enqueue, or when jobs that are held for another worker are free for all.
                wait_s = claimed.hold_ms / 1e3 or IDLE_S
            elif not full and not claimed.jobs and claimed.waiting:
                # The waiting jobs do not fit now: they may when a job here has ended, or other workers take them.
                freed = await one_is_set_within(claimed.hold_ms / 1e3 or FIT_S, change)

    async def _pause(self) -> None:
        """Leave the queue to others for a while: this worker can't read its jobs."""
        message = (
            "could not read the last %d jobs, and claims nothing for %g s: "
            "compare --job-key, --tls-ca and the clock of this worker with the routers'"
        )
        log.error(message, self._unread, self._pause_s)
        if self.on_pause is not None:
            await self.on_pause(True)
        with contextlib.suppress(*REDIS_DOWN):
            await self._queue.stop_claiming()
        await asyncio.sleep(self._pause_s)
        self._unread, self._pause_s = UNREAD_LIMIT - 1, min(2 * self._pause_s, UNREAD_PAUSE_LIMIT_S)
        if self.on_pause is not None:
            await self.on_pause(False)

    async def _capacity_to_claim(self, *, at_once: bool) -> Capacity:
        """Wait until there is reason for a claim; `at_once`: a free row is one, since the claim waits for a job."""
        while True:
            change, capacity = self._jobs.next_change, self._capacity()
            claim_at = 0.0
            if capacity.rows <= 0 and capacity.row_to_share == self._row_to_share:
                claim_at = self._full_claim_at + (IDLE_S if self._row_to_share is None else FULL_S)
            elif 0 < capacity.rows < PACED_ROWS and self._jobs.running and not at_once:
                claim_at = self._claimed_at + PACE_S
            left_s = claim_at - time.monotonic()
            if left_s <= 0:
                return capacity
            await one_is_set_within(left_s, change)

    async def end_wait(self) -> None:
        """End a claim that waits for a job; gives up after END_WAIT_S where Redis does not answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_WAIT_S):
                await self.finish_claim()

    async def finish_claim(self) -> None:
        """Take in the jobs of a claim that is under way; call it when `run` was cancelled."""
        if self._claiming is not None and not self._claiming.done():
            try:
                await self._queue.stop_waiting()
            except REDIS_DOWN as error:
                log.warning("the queue does not answer: %s", error)
            await asyncio.wait({self._claiming})

    async def close(self) -> None:
        """End what is under way."""
        if self._claiming is not None:
            self._claiming.cancel()
            await asyncio.wait({self._claiming})
        for task in tuple(self._preparing):
            task.cancel()
        await asyncio.gather(*self._preparing, return_exceptions=True)

    async def _claim(self, capacity: Capacity, wait_s: float, *, freed: bool) -> Claimed:
        self._metrics.claims.inc()
        began = time.monotonic()
        try:
            with self._usage.last_reports() as reports:
                claimed = await self._queue.claim(self._base_digest, capacity, reports, wait_s=wait_s, freed=freed)
        finally:
            self._waits = False
        if not wait_s:
            self._metrics.claim_time.observe(time.monotonic() - began)
        self._metrics.claimed.inc(len(claimed.jobs))
        self._make_room(claimed.jobs)
        for job in claimed.jobs:
            self.accept(job)
        for job in claimed.unread:
            if self._jobs.get(job.job_id, job.attempt) is None:
                local = self._jobs.add(job)
                self._links.claimed(local)
                self._results.fail(local, Failure("UNAVAILABLE", "SEAL_REFUSED", "a worker can't read the job"))
        self._unread += claimed.refused_here
        if claimed.jobs:
            self._unread, self._pause_s = 0, UNREAD_PAUSE_S
        return claimed

    def _make_room(self, claimed: Sequence[Job]) -> None:
        """Give back jobs of lost routers where the claimed jobs need their rows.

        A router that only stood still may read that a job was claimed here; then it must read this too.
        """
        for local in jobs_to_drop(self._jobs, self._results.limits, claimed, self._links.lost):
            log_fields = fields(job_id=local.job.job_id, attempt=local.job.attempt)
            log.info("router %s is lost: a job of it leaves its row to another", local.job.reply_to, extra=log_fields)
            self._results.give_back(local)

    def _capacity(self) -> Capacity:
        results = self._results
        return free_capacity(self._jobs, results.limits, results.stats, self._links, stalled=self._engine.stalled)

    def _is_idle(self, full: bool, claimed: Claimed) -> bool:
        """Return whether there is room, and nothing waits that another claim could take, now or with more room."""
        if not claimed.waiting:  # another claim would only tell so again
            return not full and self._capacity().rows > 0
        return not full and not claimed.jobs and not (claimed.crowded and self._jobs.running)

    def accept(self, job: Job) -> None:
        """Take a claimed job. Its router is told before anything else happens."""
        if self._jobs.get(job.job_id, job.attempt) is not None:  # an enqueue that was retried
            return
        local = self._jobs.add(job)
        self._links.claimed(local)
        if not self._results.accepting or self._engine.stalled:
            self._results.give_back(local)
        elif job.adapter is None and not job.suspect and job.base_digest == self._base_digest:
            self._hand_over(local)
        else:
            self.prepare(local)

    def prepare(self, local: LocalJob) -> None:
        """Bring a job into the engine in a task of its own: a suspect that waits until it may begin, or its adapter."""
        local.preparing = asyncio.get_running_loop().create_task(self._prepare(local))
        self._preparing.add(local.preparing)
        local.preparing.add_done_callback(self._preparing.discard)

    async def _prepare(self, local: LocalJob) -> None:
        """Wait until a suspect may begin, fetch the adapter, and hand the job over; or fail it."""
        job = local.job
        if job.base_digest != self._base_digest:
            message = f"the job is for base model {job.base_digest}, this worker serves {self._base_digest}"
            self._results.fail(local, Failure("FAILED_PRECONDITION", "WRONG_BASE", message, "model"))
            return
        if job.suspect:  # before it pins an adapter, because the others may wait for the disk's bytes
            local.enter(LocalJobState.WAITING_ALONE)  # meanwhile nothing is claimed
            await self._wait_until_apart(local)
        failure = None if job.adapter is None else await self._fetch_adapter(local)
        if failure is not None:
            self._results.fail(local, failure)
            return
        self._hand_over(local)

    async def _wait_until_apart(self, suspect: LocalJob) -> None:
        """Wait until nothing runs that a suspect must not begin beside.

        Suspects that a token has cleared are given back: otherwise an engine could die a second time under them.
        """
        while others := self._jobs.in_the_way_of(suspect):
            change = self._jobs.next_change
            for other in others:
                if other.job.suspect and not other.needs_all:
                    self._results.give_back(other)
            await change.wait()  # set already where one was given back

    async def _fetch_adapter(self, local: LocalJob) -> Failure | None:
        """Fetch what the job's adapter consists of, again after a failure that may pass; returns why that failed."""
        job, began = local.job, time.monotonic()
        assert job.adapter is not None
        local.enter(LocalJobState.FETCHING_ADAPTER)
        local.pin = self._fetcher.disk_pin()
        self._fetcher.sets.note(job.adapter, job.tenant)
        until = 0.0  # counts from the first failure: a download may take long
        try:
            while local.source is None:
                try:
                    local.source = await fetch_source(local.pin, job.adapter, job.tenant)
                except FetchFailedError as error:
                    until = until or time.monotonic() + FETCH_RETRY_S
                    if not self._may_retry(local, error.failure, until):
                        return error.failure
                    await asyncio.sleep(FETCH_PAUSE_S)
        except Exception:
            log.exception("an adapter could not be fetched", extra=fields(job_id=job.job_id))
            return Failure("INTERNAL", "FETCH_FAILED", f"{job.adapter.revision} could not be fetched", "adapter")
        local.fetched_at = time.monotonic()
        for choice in local.running:
            choice.adapter_ms = (local.fetched_at - began) * 1e3
        return None

    def _may_retry(self, local: LocalJob, failure: Failure, until: float) -> bool:
        """Return whether a job fetches its adapter again: a newcomer only while it keeps no other job out."""
        if failure.code not in _MAY_PASS or not local.job.last_try or time.monotonic() >= until:
            return False
        return any(local.job.emitted.values()) or not is_crowded(self._jobs, self._results.limits)

    def _hand_over(self, local: LocalJob) -> None:
        """Hand the first answer to the engine. Its siblings follow once it has a token (Results)."""
        local.enter(LocalJobState.IN_ENGINE)
        self._results.hand_over(local, local.waiting[:1])


async def one_is_set_within(timeout_s: float, *events: asyncio.Event) -> bool:
    """Wait for the first of some events; returns whether one is set."""
    # Not wait_for: in Python 3.11 that loses a cancellation which comes together with the event.
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return any(event.is_set() for event in events)


def is_crowded(jobs: LocalJobs, limits: EngineLimits) -> bool:
    """Return whether no row is lent any more: jobs whose rows others got wait here for one."""
    return len(jobs.running) >= 2 * limits.rows


def free_capacity(
    jobs: LocalJobs, limits: EngineLimits, stats: EngineStats, links: RouterLinks, *, stalled: bool
) -> Capacity:
    """Return what this worker can take now, beside its local jobs.

    No rows if the engine is `stalled`, or has a job that runs alone. Rows of jobs whose adapter is late are
    lent once each, up to twice the engine's; those of jobs of a lost router count as free (see `jobs_to_drop`).
    """
    running = jobs.running
    preparing = [local for local in jobs.all() if local.preparing_for_engine]
    late_at = time.monotonic() - LATE_S
    lost = links.lost
    late = sum(
        len(local.running) for local in preparing if local.claimed_at < late_at and local.job.reply_to not in lost
    )
    spare = sum(choice.job.reply_to in lost for choice in running) if lost else 0
    rows = min(limits.rows + late, 2 * limits.rows) - len(running) + spare
    if running:  # a job that is to run alone takes all rows: these are not all
        rows = min(rows, max(1, limits.rows - 1))
    tokens = limits.max_tokens  # a long prompt may always come in when nothing else is here
    if running:
        free = (stats.blocks_free + stats.blocks_cached) * limits.block_size
        tokens = max(0, free - sum(local.job.prefill_tokens for local in preparing))
    # Suspects that have been cleared go on beside the next one, for which all rows that are left are all.
    apart = bool(running) and all(choice.job.suspect for choice in running)
    tenants = {choice.job.tenant for choice in running}
    closed = stalled or any(local.needs_all for local in jobs.all())
    shares = not closed and not is_crowded(jobs, limits)
    return Capacity(
        rows=0 if closed else rows,
        rows_limit=max(1, rows) if apart else limits.rows,
        tokens=tokens,
        max_tokens=limits.max_tokens,
        max_rank=limits.max_rank,
        adapters=stats.adapters,
        routers=links.live,
        row_to_share=row_to_share((choice.job for choice in running), limits.rows) if shares else None,
        only_tenant=tenants.pop() if len(tenants) == 1 else "",
    )


def jobs_to_drop(
    jobs: LocalJobs, limits: EngineLimits, claimed: Sequence[Job], lost: Collection[str]
) -> list[LocalJob]:
    """Return the jobs of lost routers whose rows the claimed jobs need, those that were claimed first.

    A lost router is dead, stands still, or has dispatched these jobs again; they are kept while their rows are of no
    use to others.
    """
    dropped: list[LocalJob] = []
    if lost:
        lacking = len(jobs.running) + sum(min(job.rows, limits.rows) for job in claimed) - limits.rows
        for local in jobs.all():
            if lacking > 0 and local.job.reply_to in lost and local.running:
                dropped.append(local)
                lacking -= len(local.running)
    return dropped


def row_to_share(running: Iterable[Job], rows: int) -> RowToShare | None:
    """Return which of a worker's rows a tenant below its share may take; None where no tenant has two.

    `running` has the job of every answer that takes a row, or waits for one.
    """
    rows_of, weights = Counter[str](), dict[str, float]()
    for job in running:
        rows_of[job.tenant] += 1
        weights[job.tenant] = job.weight
    shares = divide(rows, rows_of, weights)
    rows_left = {tenant: (math.floor(share) - 1) / weights[tenant] for tenant, share in shares.items()}
    largest = max(rows_left, key=lambda tenant: rows_left[tenant], default=None)
    if largest is None or rows_left[largest] <= 0:
        return None
    return RowToShare(largest, rows_left[largest], tuple(sorted(rows_of.items())))


def divide(rows: int, demand: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, float]:
    """Divide rows among tenants by their weights; what one does not want goes to the others."""
    shares: dict[str, float] = {}
    rows_left, weight_left = float(rows), sum(weights.values())
    for tenant in sorted(demand, key=lambda tenant: demand[tenant] / weights[tenant]):
        shares[tenant] = min(float(demand[tenant]), rows_left * weights[tenant] / weight_left)
        rows_left -= shares[tenant]
        weight_left -= weights[tenant]
    return shares
