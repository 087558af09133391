"""A claim's look at one waiting job, as broker/lua/include/job_looks.lua makes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from bench.queue_model.live_routers import LiveRouters
from bench.queue_model.quarantine import QuarantineModel
from bench.queue_model.suspects import SuspectsModel
from bench.queue_model.waiting_jobs import WaitingJob, WaitingJobs
from broker import terms
from broker.messages import Capacity
from broker.queue_entry import Entry


class ChargeClaim(Protocol):
    """Charges a tenant for a claim; `loads` says that the worker has to load the adapter."""

    def __call__(self, job: WaitingJob, *, loads: bool) -> None: ...


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


class JobLooks:
    """Takes a job, passes it over, or drops it; keeps what the scan still has. `free_rows` are those that are left."""

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
        # Of jobs that take a row from another tenant there is one a claim.
        self._row_to_share = arguments.capacity.row_to_share
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

    def most_demanded(self) -> tuple[bytes, ...]:
        """Return the adapter requests of most of the jobs that suit but did not fit."""
        ordered = sorted(self._demand, key=lambda request: -self._demand[request])
        return tuple(ordered[: terms.ADAPTER_REQUESTS_LIMIT])

    def look(self, job_id: str, charge: ChargeClaim) -> bool | None:
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
        apart = self._suspects.begin_apart(entry)
        if apart:
            wanted = self._rows_apart(job)
            if wanted is None:
                return False
            rows = wanted
        may_reserve = self._is_first or job.reserved_for == self._arguments.worker
        overdue = may_reserve and self._waited_ms(job) >= terms.PATIENCE_MS
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
            self._waiting.forget(job_id, claimed=True)
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
        if self._waited_ms(job) < terms.BELOW_SHARE_MS:
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
        reserved_ms = job.reserved_until_ms - self._now_ms
        if job.reserved_for not in (None, worker) and 0 < reserved_ms <= terms.RESERVE_MS:
            # Empty at most one worker at a time for jobs that need a whole one.
            self._is_first = self._is_first and entry.rows < terms.ALL_ROWS
            return False
        held_ms = self._held_for_ms(job, entry)
        if held_ms > 0:
            self.hold_ms = min(self.hold_ms or held_ms, held_ms)
            self.seen_before_held = min(self.seen_before_held, job.arrival - 1)
        return held_ms <= 0

    def _waited_ms(self, job: WaitingJob) -> int:
        """Return how long a job has waited; a job of before the clock went back has waited long enough for anything."""
        return self._now_ms - (job.queued_ms if job.queued_ms <= self._now_ms else 0)

    def _held_for_ms(self, job: WaitingJob, entry: Entry) -> int:
        """Return how many ms a job is still held for a worker with free rows that its adapter prefers to this one."""
        left_ms = terms.HOLD_MS - self._waited_ms(job)
        if not entry.adapter or job.has_begun or entry.adapter in self._resident or left_ms <= 0:
            return 0
        for other in filter(None, entry.prefer.split("\n")):
            if other == self._arguments.worker:
                return 0
            if self._free_rows_of.get(other, 0) > 0:
                return left_ms
        return 0
