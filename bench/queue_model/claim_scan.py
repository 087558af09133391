"""A scan of a claim over the waiting jobs, as broker/lua/claim.lua makes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from bench.queue_model.live_routers import LiveRouters
from bench.queue_model.quarantine import QuarantineModel
from bench.queue_model.suspects import SuspectsModel
from bench.queue_model.waiting_jobs import Place, WaitingJob, WaitingJobs
from broker import terms
from broker.messages import Capacity
from broker.queue_entry import Entry


class ChargeClaim(Protocol):
    """Charges a tenant for a claim; `loads` says that the worker has to load the adapter."""

    def __call__(self, job: WaitingJob, *, loads: bool) -> None: ...


class _TenantScan:
    """The progress of a scan in a tenant's queue."""

    def __init__(self, counter: float, name: str) -> None:
        self.counter = counter
        self.name = name
        self.passed = 0
        self.position = 0
        self.done = False


@dataclass(frozen=True, slots=True)
class ScanArguments:
    """The worker that a scan is for, the time, and where the scan begins."""

    worker: str
    base_digest: str
    capacity: Capacity
    now_ms: int
    # The number of this scan among the worker's, from 0 on.
    scan_number: int
    skipped_tenants: int


class ClaimScan:
    """A scan takes the jobs that suit a worker, and passes over the others. `free_rows` are those that are left."""

    def __init__(
        self,
        waiting: WaitingJobs,
        routers: LiveRouters,
        quarantine: QuarantineModel,
        suspects: SuspectsModel,
        free_rows: Mapping[str, int],
        arguments: ScanArguments,
    ) -> None:
        self._waiting = waiting
        self._quarantine = quarantine
        self._suspects = suspects
        self._routers = routers
        self._free_rows_of = free_rows
        self._arguments = arguments
        self._capacity = arguments.capacity
        self._resident = frozenset(arguments.capacity.adapters)
        self._now_ms = arguments.now_ms
        # Only the job that is first in line may reserve a worker.
        self._is_first = arguments.skipped_tenants == 0
        self._free_tokens = arguments.capacity.tokens
        self._passes_left, self._lookahead_left = terms.PASSES_PER_SCAN, terms.LOOKAHEAD_LIMIT
        self._window_exceeded = False
        # Of jobs that take a row from another tenant there is one a claim.
        self._row_to_share = arguments.capacity.row_to_share
        # Then the scan looks at more tenants, and at fewer jobs of each.
        self._looks_around = self._row_to_share is not None and arguments.capacity.rows < 1
        self._demand: dict[bytes, int] = {}
        # The tenant of all jobs that the worker has, those of this scan included.
        self._only_tenant = arguments.capacity.only_tenant
        self.free_rows = arguments.capacity.rows
        self.taken: list[str] = []
        # The last of the taken jobs, where it begins apart from other tenants' jobs.
        self.apart: str | None = None
        self.work = 0
        self.hold_ms = 0
        # Routers of jobs that suit the worker but for its missing link, in the order of the scan.
        self.unlinked: dict[str, None] = {}
        # The arrival before the oldest held job's.
        self.seen_before_held = math.inf
        self.looks = 0
        self.saturated = False

    def run(self, charge: ChargeClaim) -> int | None:
        """Scan the queue; return how many tenants the next scan must skip, or None if another scan is not needed."""
        for _, job_id in self._redispatched():
            if not self._may_look():
                break
            self._look(job_id, charge)
        skipped, window = self._arguments.skipped_tenants, terms.TENANTS_PER_SCAN
        lowest = [_TenantScan(*tenant) for tenant in self._waiting.counters.lowest_active(skipped, window)]
        # Tenants that the scan does not see may have a lower counter than one that has grown beyond this.
        horizon = lowest[-1].counter if len(lowest) == window else math.inf
        seen = 0
        while True:
            not_done = [tenant for tenant in lowest if not tenant.done]
            # Of equals min takes the earlier one.
            tenant = min(not_done, key=lambda tenant: tenant.counter, default=None)
            if tenant is None or tenant.counter > horizon or not self._may_look():
                break
            self._look_at_tenant(tenant, charge)
            seen += tenant.done and bool(self._waiting.queue(tenant.name))
        if self.free_rows < 1:
            self.saturated = True
        more = self._passes_left < 1 or horizon < math.inf
        if self.taken or self.free_rows < 1 or not (more or self._window_exceeded):
            return None
        return skipped + seen if more else 0

    def run_news(self, job_ids: Iterable[str], charge: ChargeClaim) -> None:
        """Look at the last arrivals."""
        self._is_first = False
        for job_id in job_ids:
            if self.free_rows < 1:
                break
            if self._waiting.find(job_id) is not None:
                self._look(job_id, charge)
        self.saturated = self.saturated or self.free_rows < 1

    def most_demanded(self) -> tuple[bytes, ...]:
        """Return the adapter requests of most of the jobs that suit but did not fit."""
        ordered = sorted(self._demand, key=lambda request: -self._demand[request])
        return tuple(ordered[: terms.ADAPTER_REQUESTS_LIMIT])

    def _redispatched(self) -> list[tuple[Place, str]]:
        """Return the jobs that have begun and that this scan looks at."""
        jobs = self._waiting.redispatched
        window = terms.LOOKAHEAD_LIMIT // 2 if self._looks_around else terms.REDISPATCHED_PER_SCAN
        if len(jobs) <= window:
            return list(jobs)
        start = self._second_half_start(len(jobs), window)
        return jobs[: window // 2] + jobs[start : start + window // 2]

    def _look_at_tenant(self, tenant: _TenantScan, charge: ChargeClaim) -> None:
        taken = self._look(self._waiting.queue(tenant.name)[tenant.position][1], charge)
        left, window = len(self._waiting.queue(tenant.name)), terms.PASSES_PER_TENANT
        if not taken:
            self._passes_left -= 1
        if taken is False:
            tenant.passed += 1
            tenant.position += 1
            if tenant.passed == window // 2 and left > window:
                tenant.position = self._second_half_start(left, window)
        tenant.counter = self._waiting.counters.value(tenant.name)
        passes = terms.LOOKAHEAD_PER_TENANT if self._looks_around else window
        tenant.done = tenant.passed >= passes or tenant.position >= left

    def _second_half_start(self, length: int, window: int) -> int:
        """Return where this scan goes on in a queue that is longer than its window."""
        self._window_exceeded = True
        return window // 2 + self._arguments.scan_number * window // 2 % (length - window // 2)

    def _may_look(self) -> bool:
        if self.free_rows > 0:
            return self._passes_left > 0
        self._lookahead_left -= 1
        return self._lookahead_left >= 0

    def _look(self, job_id: str, charge: ChargeClaim) -> bool | None:
        """Return True for a job that was taken, False for one that was passed over, None for one that is gone."""
        job = self._waiting.find(job_id)
        assert job is not None, "a queue has only jobs that wait"
        self.looks += 1
        refused_ms = self._quarantine.refused_ms(job.entry, self._now_ms)
        lives = self._routers.is_alive(job.entry.router, self._now_ms)
        if job.deadline_ms <= self._now_ms or not lives or refused_ms:
            self._waiting.forget(job_id)
            return None
        if not self._suits(job):
            return False
        entry, rows = job.entry, min(job.entry.rows, self._capacity.rows_limit)
        apart = self._suspects.begin_apart(entry, self._now_ms)
        if apart:
            wanted = self._rows_apart(job)
            if wanted is None:
                return False
            rows = wanted
        may_reserve = self._is_first or job.reserved_for == self._arguments.worker
        overdue = may_reserve and self._now_ms - job.queued_ms >= terms.PATIENCE_MS
        self._is_first = False
        fits = rows <= self.free_rows and (entry.prefill <= self._free_tokens or overdue)
        if fits or self._may_share_row(job, rows):
            if not fits:
                self._row_to_share = None
            self.free_rows -= rows
            self._free_tokens -= entry.prefill
            if apart:
                self._suspects.try_job(job_id, entry, self._now_ms)
                self.free_rows, self._row_to_share, self.apart = 0, None, job_id
            if entry.tenant != self._only_tenant:
                self._only_tenant = ""
            self.work += job.work
            self.taken.append(job_id)
            charge(job, loads=entry.adapter not in self._resident)
            self._waiting.forget(job_id)
            return True
        self.saturated = True
        if entry.wanted:
            self._demand[entry.wanted] = self._demand.get(entry.wanted, 0) + 1
        if overdue and self.free_rows > 0:
            job.reserved_for, job.reserved_until_ms = self._arguments.worker, self._now_ms + terms.RESERVE_MS
            self.free_rows = 0
        return False

    def _rows_apart(self, job: WaitingJob) -> int | None:
        """Return the rows that a job takes which begins apart from other tenants' jobs; None: it waits."""
        entry, all_rows = job.entry, self._capacity.rows_limit
        tried = self._suspects.is_another_tried(job.job_id, entry, self._now_ms)
        if entry.rows >= terms.ALL_ROWS:  # it has a strike: a worker is emptied for it
            return None if tried else all_rows
        if entry.tenant == self._only_tenant:
            rows = min(entry.rows, all_rows)
        elif self.free_rows == all_rows and not tried:
            rows = all_rows
        else:
            return None
        return rows if rows <= self.free_rows and entry.prefill <= self._free_tokens else None

    def _may_share_row(self, job: WaitingJob, rows: int) -> bool:
        """Return whether a job that does not fit may have a row that another tenant's job is using."""
        row, entry, counters = self._row_to_share, job.entry, self._waiting.counters
        if row is None or rows >= self._capacity.rows_limit:
            return False
        if self._now_ms - job.queued_ms < terms.BELOW_SHARE_MS:
            return False
        if (dict(row.tenant_rows).get(entry.tenant, 0) + 1) / entry.weight > row.rows_left:
            return False
        return counters.value(entry.tenant) < counters.value(row.tenant)

    def _suits(self, job: WaitingJob) -> bool:
        entry, capacity, worker = job.entry, self._capacity, self._arguments.worker
        if entry.tokens > capacity.max_tokens or entry.rank > capacity.max_rank:
            return False
        if entry.base != self._arguments.base_digest:
            return False
        if capacity.routers is not None and entry.router not in capacity.routers:
            self.unlinked[entry.router] = None
            self.saturated = True
            return False
        if job.reserved_for not in (None, worker) and job.reserved_until_ms > self._now_ms:
            # Empty at most one worker at a time for jobs that need a whole one.
            self._is_first = self._is_first and entry.rows < terms.ALL_ROWS
            return False
        held_ms = self._held_for_ms(job, entry)
        if held_ms > 0:
            self.hold_ms = min(self.hold_ms or held_ms, held_ms)
            self.seen_before_held = min(self.seen_before_held, job.place[2] - 1)
        return held_ms <= 0

    def _held_for_ms(self, job: WaitingJob, entry: Entry) -> int:
        """Return how many ms a job is still held for a worker with free rows that its adapter prefers to this one."""
        left_ms = job.queued_ms + terms.HOLD_MS - self._now_ms
        if not entry.adapter or job.has_begun or entry.adapter in self._resident or left_ms <= 0:
            return 0
        for other in filter(None, entry.prefer.split("\n")):
            if other == self._arguments.worker:
                return 0
            if self._free_rows_of.get(other, 0) > 0:
                return left_ms
        return 0
