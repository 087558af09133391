"""The queue of one cell in Python, decision for decision as the scripts of `broker.queue`.

Time is an argument, in milliseconds. Free rows do not expire: the caller reports a lost worker with `clear_free_rows`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

from bench.queue_model.charges import Charges
from bench.queue_model.claim_rate import ClaimRate
from bench.queue_model.claim_scan import ClaimScan
from bench.queue_model.decisions import ClaimDecision, Refusal
from bench.queue_model.job_looks import ScanArguments
from bench.queue_model.live_routers import LiveRouters
from bench.queue_model.quarantine import QuarantineModel
from bench.queue_model.suspects import SuspectsModel
from bench.queue_model.waiting_jobs import WaitingJob, WaitingJobs, use_of
from broker import terms
from broker.claims import ClaimPlan
from broker.messages import Capacity, Job
from broker.queue_entry import Entry
from broker.terms import Placement, QueueLimits, QueueState, UsageReport

# A claim that looks at all jobs that it may.
CLAIM_ALL = ClaimPlan(seen=0, news_only=False, scans=terms.SCANS_PER_CLAIM)


class QueueModel:
    """The model of a cell's queue."""

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self.waiting = WaitingJobs()
        self._limits = limits or QueueLimits()
        self._charges = Charges(self.waiting.counters)
        # Each worker's free rows after its last claim.
        self._free_rows: dict[str, int] = {}
        self._routers = LiveRouters()
        self.quarantine = QuarantineModel()
        self.suspects = SuspectsModel()
        # Each worker's number of scans, and the tenants that its last claim has passed over without finding a job.
        self._scan_numbers: Counter[str] = Counter()
        self._skipped_tenants: dict[str, int] = {}
        self._claim_rate = ClaimRate()
        self._arrivals = 0
        self._displaced: set[str] = set()
        # Ids of the last arrivals.
        self._news: deque[str] = deque(maxlen=terms.NEWS_LIMIT)

    def counter_of(self, tenant: str) -> float:
        """Return what a tenant was served, in charged tokens over its weight."""
        return self.waiting.counters.value(tenant)

    def enqueue(self, job: Job, placement: Placement, now_ms: int) -> Refusal | None:
        """Put a job into the queue; a newer attempt replaces an older one. First attempts may be refused."""
        self._routers.beat(job.reply_to, now_ms)
        waiting = self.waiting.find(job.job_id)
        if waiting is not None and waiting.entry.attempt >= job.attempt:
            return None
        if waiting is not None:
            self.waiting.forget(job.job_id)
        self._displaced.discard(job.job_id)
        entry = Entry.from_job(job, placement)
        if entry.strikes:
            self.suspects.strike(job.job_id, entry, now_ms)
        refused_ms = self.quarantine.refused_ms(entry, now_ms)
        if refused_ms:
            return Refusal("quarantined", refused_ms)
        self._arrivals += 1
        self._news.append(job.job_id)
        deadline = now_ms + job.deadline_ms if job.deadline_ms else math.inf
        arrived = WaitingJob(job.job_id, entry, self._arrivals, now_ms, deadline)
        if entry.begun and (job.attempt > 1 or self._may_lead(arrived, now_ms)):
            arrived.has_begun = True
        else:
            arrived.turn = self.waiting.keys.next_turn(entry)
            limits = self._limits.for_placement(placement)
            if job.attempt == 1 and (refusal := self._refusal(arrived, limits, now_ms)):
                return refusal
        self.waiting.insert(arrived)
        return None

    def look_up(self, job_id: str, attempt: int) -> QueueState:
        """Return the state of an attempt; a newer attempt of the same job counts too."""
        waiting = self.waiting.find(job_id)
        if waiting is not None and waiting.entry.attempt >= attempt:
            return QueueState.WAITS
        return QueueState.DISPLACED if job_id in self._displaced else QueueState.ABSENT

    def _may_lead(self, job: WaitingJob, now_ms: int) -> bool:
        """Return whether a resumed job goes before newcomers."""
        waiting, tenant = self.waiting, job.entry.tenant
        ahead = max(0.0, waiting.counters.value(tenant) - waiting.counters.lowest()) * job.entry.weight
        lead = ahead + waiting.begun_work(tenant)
        return lead <= max(terms.RESUME_LEAD_WORK, terms.RESUME_LEAD_MS * self._claim_rate.per_ms(now_ms))

    def _refusal(self, job: WaitingJob, limits: QueueLimits, now_ms: int) -> Refusal | None:
        entry, waiting = job.entry, self.waiting
        jobs, size = len(waiting.queue(entry.tenant)) + 1, waiting.newcomer_bytes_of(entry.tenant) + len(entry.body)
        if jobs > limits.tenant_jobs:
            return Refusal("tenant_jobs")
        if waiting.tenant_bytes(entry.tenant) + len(entry.body) > limits.tenant_bytes:
            return Refusal("tenant_bytes")
        if entry.key:
            key_jobs, key_bytes = waiting.keys.waiting_of(entry)
            if key_jobs >= limits.key_jobs:
                return Refusal("key_jobs")
            if key_bytes + len(entry.body) > limits.key_bytes:
                return Refusal("key_bytes")
        if math.isfinite(job.deadline_ms):
            wait_ms = self._wait_before_turn_ms(job, now_ms)
            if wait_ms > terms.DEADLINE_DOUBT * (job.deadline_ms - now_ms):
                return Refusal("late", math.floor(wait_ms))
        limit = self._make_room(len(entry.body), use_of(jobs, size, entry.weight, limits))
        return Refusal(limit) if limit else None

    def _make_room(self, size: int, use: float) -> str:
        """Displace other tenants' jobs until one of `size` bytes fits; return the limit that is still exceeded."""
        for displaced_count in range(terms.DISPLACED_PER_ENQUEUE + 1):
            limit = self._exceeded_limit(size)
            highest, job_id = self.waiting.highest_use(self._limits) if limit else (0.0, "")
            if not limit or highest <= use or displaced_count == terms.DISPLACED_PER_ENQUEUE:
                return limit
            self.waiting.forget(job_id)
            self._displaced.add(job_id)
        raise AssertionError("the loop returns")

    def _exceeded_limit(self, size: int) -> str:
        if len(self.waiting) - len(self.waiting.redispatched) >= self._limits.jobs:
            return "jobs"
        return "bytes" if self.waiting.newcomers_bytes + size > self._limits.bytes else ""

    def _wait_before_turn_ms(self, job: WaitingJob, now_ms: int) -> float:
        """Return in how many ms a job's turn comes, at its tenant's share of the claim rate; 0 where unknown."""
        tenant, rate = job.entry.tenant, self._claim_rate.per_ms(now_ms)
        tenant_jobs = len(self.waiting.queue(tenant))
        if not tenant_jobs or rate <= 0:
            return 0.0
        own_work = self.waiting.count_before(job) * self.waiting.tenant_work(tenant) / tenant_jobs
        return (own_work + self.waiting.work_beside(job, own_work)) / rate if own_work else 0.0

    def claim(
        self, worker: str, base_digest: str, capacity: Capacity, now_ms: int, plan: ClaimPlan = CLAIM_ALL
    ) -> ClaimDecision:
        """Take the next jobs that suit a worker."""
        self.suspects.look(now_ms)
        hold_ms, looks, requests = 0, 0, tuple[bytes, ...]()
        unlinked: dict[str, None] = {}
        skip: int | None = 0
        for scan_count in range(plan.scans):
            for expired in self.waiting.expired(now_ms, terms.EXPIRED_PER_SCAN):
                self.waiting.forget(expired)
            arguments = ScanArguments(
                worker, base_digest, capacity, now_ms, self._scan_numbers[worker], skipped_tenants=skip or 0
            )
            scan = ClaimScan(self.waiting, self._routers, self.quarantine, self.suspects, self._free_rows, arguments)
            skip = None if plan.news_only else scan.run(self._charges.charge_claim)
            if (skip is None or scan_count == plan.scans - 1) and not scan.taken:
                scan.run_news(self._news_since(plan.seen), self._charges.charge_claim)
                skip = None if scan.taken or scan.free_rows < 1 else skip
            self._scan_numbers[worker] += 1
            self._claim_rate.measure(scan.work if len(self.waiting) and scan.saturated else None, now_ms)
            self._free_rows[worker] = max(scan.free_rows, 0)
            hold_ms, looks = min(hold_ms or scan.hold_ms, scan.hold_ms or hold_ms), looks + scan.looks
            requests = requests or scan.most_demanded()
            unlinked.update(scan.unlinked)
            if skip is None:
                break
            skip = max(skip, self._skipped_tenants.get(worker, 0)) if scan_count == 0 else skip
        if not plan.news_only:
            self._skipped_tenants[worker] = skip or 0
        seen = 0 if scan.taken else int(min(self._arrivals, scan.seen_before_held))
        return ClaimDecision(
            tuple(scan.taken),
            len(self.waiting),
            requests,
            hold_ms,
            tuple(unlinked),
            scan.saturated,
            looks,
            seen,
            scan.apart,
        )

    def _news_since(self, seen: int) -> list[str]:
        """Return the ids of the jobs that came after a number, as far as they are kept, each once."""
        count = min(self._arrivals - seen, len(self._news))
        return list(dict.fromkeys(list(self._news)[len(self._news) - count :]))

    def beat_router(self, router: str, now_ms: int) -> None:
        """Record that a router lives, as each of its enqueues does; jobs of dead routers are dropped."""
        self.waiting.counters.rebase()
        self.waiting.counters.prune_idle()
        self._routers.beat(router, now_ms)

    def live_routers(self, now_ms: int) -> list[str]:
        """Return the addresses of the live routers."""
        return self._routers.live(now_ms)

    def clear_free_rows(self, worker: str) -> None:
        """Hold no job for a worker until its next claim."""
        self._free_rows.pop(worker, None)

    def charge(self, reports: Sequence[UsageReport], now_ms: int) -> None:
        """Charge tenants what their jobs have made since the last report."""
        if reports:
            self.suspects.look(now_ms)
        for report in reports:
            self.suspects.report(report.job_id, report.attempt, report.tokens, now_ms, ended=report.ended)
        self._charges.charge(reports)

    def record_death(self, tenant: str, adapter: str, job_id: str, now_ms: int) -> int:
        """Record a job that engines died of; returns for how many ms its tenant and adapter are refused."""
        self.suspects.convicted(job_id)
        return self.quarantine.record_death(tenant, adapter, job_id, now_ms)

    def forget_tenant(self, tenant: str, now_ms: int) -> int:
        """Forget all of a tenant; returns how many of its jobs waited."""
        self._news = deque(
            ("" if job_id.startswith(f"{tenant}/") else job_id for job_id in self._news), terms.NEWS_LIMIT
        )
        self.quarantine.forget_tenant(tenant)
        self.suspects.forget_tenant(tenant, now_ms)
        return self.waiting.forget_tenant(tenant)

    def finish(self, job_id: str, attempt: int) -> None:
        """Forget a job, up to this attempt."""
        waiting = self.waiting.find(job_id)
        if waiting is None:
            self._displaced.discard(job_id)
        elif waiting.entry.attempt <= attempt:
            self.waiting.forget(job_id)
        self._charges.forget(job_id, attempt)
