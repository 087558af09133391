"""A scan of a claim over the waiting jobs, as broker/lua/claim.lua makes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from bench.queue_model.job_looks import ChargeClaim, JobLooks, ScanArguments
from bench.queue_model.live_routers import LiveRouters
from bench.queue_model.quarantine import QuarantineModel
from bench.queue_model.suspects import SuspectsModel
from bench.queue_model.waiting_jobs import Place, WaitingJobs
from broker import terms


class _TenantScan:
    """The progress of a scan in a tenant's queue."""

    def __init__(self, counter: float, name: str) -> None:
        self.counter = counter
        self.name = name
        self.passed = 0
        self.position = 0
        self.done = False


class ClaimScan(JobLooks):
    """Chooses the jobs that a claim looks at, and takes those that suit the worker."""

    def __init__(
        self,
        waiting: WaitingJobs,
        routers: LiveRouters,
        quarantine: QuarantineModel,
        suspects: SuspectsModel,
        free_rows: Mapping[str, int],
        arguments: ScanArguments,
    ) -> None:
        super().__init__(waiting, routers, quarantine, suspects, free_rows, arguments)
        self._passes_left, self._lookahead_left = terms.PASSES_PER_SCAN, terms.LOOKAHEAD_LIMIT
        self._window_exceeded = False
        # Without a free row, but with a row to share, the scan looks at more tenants, and at fewer jobs of each.
        self._looks_around = arguments.capacity.row_to_share is not None and arguments.capacity.rows < 1

    def run(self, charge: ChargeClaim) -> int | None:
        """Scan the queue; return how many tenants the next scan must skip, or None if another scan is not needed."""
        for _, job_id in self._redispatched():
            if not self._may_look():
                break
            self.look(job_id, charge)
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
                self.look(job_id, charge)
        self.saturated = self.saturated or self.free_rows < 1

    def _redispatched(self) -> list[tuple[Place, str]]:
        """Return the jobs that have begun and that this scan looks at."""
        jobs = self._waiting.redispatched
        window = terms.LOOKAHEAD_LIMIT // 2 if self._looks_around else terms.REDISPATCHED_PER_SCAN
        if len(jobs) <= window:
            return list(jobs)
        start = self._second_half_start(len(jobs), window)
        return jobs[: window // 2] + jobs[start : start + window // 2]

    def _look_at_tenant(self, tenant: _TenantScan, charge: ChargeClaim) -> None:
        taken = self.look(self._waiting.queue(tenant.name)[tenant.position][1], charge)
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
        if self._arguments.capacity.rows > 0:
            return False
        self._lookahead_left -= 1
        return self._lookahead_left >= 0
