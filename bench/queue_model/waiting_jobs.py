"""The waiting jobs: each tenant's queue, the jobs that have begun, and totals of bytes and work."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from bench.queue_model.key_turns import KeyTurns
from bench.queue_model.tenant_counters import TenantCounters
from broker import terms
from broker.queue_entry import Entry
from broker.terms import QueueLimits

# Negated priority, whether the job has a turn, turn or deadline, whether it is a first attempt, arrival.
Place = tuple[int, bool, float, bool, int]


@dataclass(slots=True, eq=False)
class WaitingJob:
    """A job that waits; lower places come first."""

    job_id: str
    entry: Entry
    # The number of its arrival.
    arrival: int
    queued_ms: int
    deadline_ms: float
    # The worker that is reserved for the job.
    reserved_for: str | None = None
    reserved_until_ms: int = 0
    # Whether the answer has begun: the job goes before newcomers.
    has_begun: bool = False
    # The turn among the API keys of its tenant; None: it has none.
    turn: float | None = None

    @property
    def place(self) -> Place:
        """Return the place in its queue."""
        if self.has_begun:  # jobs that need a whole worker go first
            return (-1 if self.entry.rows >= terms.ALL_ROWS else 0, False, 0.0, False, self.arrival)
        is_first = self.entry.attempt == 1
        if self.turn is None:
            return -self.entry.priority, False, self.deadline_ms, is_first, self.arrival
        return -self.entry.priority, True, math.floor(self.turn), is_first, self.arrival

    @property
    def work(self) -> int:
        """Return the tokens charged for the job if its answer has its full length."""
        entry = self.entry
        return terms.PROMPT_WEIGHT * entry.prompt + terms.OUTPUT_WEIGHT * max(0, entry.tokens - entry.prompt)


class WaitingJobs:
    """All waiting jobs of a cell, and the counters of their tenants."""

    def __init__(self) -> None:
        self.counters = TenantCounters()
        self.keys = KeyTurns()
        # Bytes of the newcomers; of each tenant's newcomers, and of its jobs that have begun.
        self.newcomers_bytes = 0
        self.redispatched: list[tuple[Place, str]] = []
        self._jobs: dict[str, WaitingJob] = {}
        self._queues: dict[str, list[tuple[Place, str]]] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._newcomer_bytes_of: defaultdict[str, int] = defaultdict(int)
        self._begun_bytes_of: defaultdict[str, int] = defaultdict(int)
        self._tenant_work: defaultdict[str, int] = defaultdict(int)
        # Each tenant's weight when its queue began.
        self._weights: dict[str, float] = {}
        self._begun_work: defaultdict[str, int] = defaultdict(int)

    def __len__(self) -> int:
        return len(self._jobs)

    def find(self, job_id: str) -> WaitingJob | None:
        """Return a waiting job; None if no job of this id waits."""
        return self._jobs.get(job_id)

    def queue(self, tenant: str) -> Sequence[tuple[Place, str]]:
        """Return place and id of a tenant's newcomers in order: its jobs that have not begun."""
        return self._queues.get(tenant, ())

    def begun_work(self, tenant: str) -> int:
        """Return the sum of the work of a tenant's jobs that have begun."""
        return self._begun_work[tenant]

    def highest_use(self, limits: QueueLimits) -> tuple[float, str]:
        """Return the highest use of the queue by a tenant with newcomers, and its last job; 0 without any."""
        uses = [(self.use(tenant, limits), tenant.encode()) for tenant in self._queues]
        if not uses:
            return 0.0, ""
        use, tenant = max(uses)
        return use, self._queues[tenant.decode()][-1][1]

    def use(self, tenant: str, limits: QueueLimits) -> float:
        """Return the use of the queue by a tenant with newcomers."""
        queue = self._queues[tenant]
        weight = self._jobs[queue[-1][1]].entry.weight
        return use_of(len(queue), self._newcomer_bytes_of[tenant], weight, limits)

    def newcomer_bytes_of(self, tenant: str) -> int:
        """Return the bytes of a tenant's newcomers."""
        return self._newcomer_bytes_of[tenant]

    def tenant_bytes(self, tenant: str) -> int:
        """Return the bytes of a tenant's jobs, those that have begun included."""
        return self._newcomer_bytes_of[tenant] + self._begun_bytes_of[tenant]

    def tenant_work(self, tenant: str) -> int:
        """Return the sum of the work of a tenant's newcomers."""
        return self._tenant_work[tenant]

    def work_beside(self, job: WaitingJob, own_work: float) -> float:
        """Return the work of other tenants that is claimed while `own_work` of the job's tenant is."""
        tenants = [name for _, name in self.counters.lowest_active(0, terms.TENANTS_PER_ESTIMATE)]
        others = [tenant for tenant in tenants if tenant != job.entry.tenant]
        if not others:
            return 0.0
        weight = job.entry.weight
        work = 0.0
        for tenant in others:
            work += min(self._tenant_work[tenant], own_work * self._weights[tenant] / weight)
        return work / len(others) * (self.counters.count_active() - 1)

    def count_before(self, job: WaitingJob) -> int:
        """Return how many jobs of its tenant come before a job."""
        return bisect_left(self.queue(job.entry.tenant), (job.place, job.job_id))

    def expired(self, now_ms: int, limit: int) -> list[str]:
        """Return the ids of at most `limit` jobs whose deadline has passed, the earliest first."""
        return [job_id for deadline, job_id in self._deadlines[:limit] if deadline <= now_ms]

    def insert(self, job: WaitingJob) -> None:
        """Put a job into its queue."""
        tenant = job.entry.tenant
        self._jobs[job.job_id] = job
        self._count(job, 1)
        if job.deadline_ms < math.inf:
            insort(self._deadlines, (job.deadline_ms, job.job_id))
        if job.has_begun:
            insort(self.redispatched, (job.place, job.job_id))
        else:
            insort(self._queues.setdefault(tenant, []), (job.place, job.job_id))
            self.keys.add(job.entry, job.work, job.turn)
            if len(self._queues[tenant]) == 1:
                self._weights[tenant] = job.entry.weight
                self.counters.activate(tenant)

    def forget(self, job_id: str, *, claimed: bool = False) -> None:
        """Delete a waiting job."""
        job = self._jobs.pop(job_id)
        if not job.has_begun:
            self.keys.remove(job.entry)
            if claimed:
                self.keys.note_claim(job.entry, job.turn)
            else:
                self.keys.give_back(job.entry, job.work, job.turn)
        tenant = job.entry.tenant
        self._count(job, -1)
        if job.deadline_ms < math.inf:
            del self._deadlines[bisect_left(self._deadlines, (job.deadline_ms, job_id))]
        queue = self.redispatched if job.has_begun else self._queues[tenant]
        del queue[bisect_left(queue, (job.place, job_id))]
        if not job.has_begun and not queue:
            del self._queues[tenant]
            self.counters.deactivate(tenant)
            self.keys.forget(tenant)

    def forget_tenant(self, tenant: str) -> int:
        """Delete a tenant's jobs and its counter; returns how many jobs there were."""
        own = [job_id for job_id, job in self._jobs.items() if job.entry.tenant == tenant]
        for job_id in own:
            self.forget(job_id)
        self.counters.forget_idle(tenant)
        return len(own)

    def _count(self, job: WaitingJob, sign: int) -> None:
        tenant, size = job.entry.tenant, sign * len(job.entry.body)
        if job.has_begun:
            self._begun_bytes_of[tenant] += size
            self._begun_work[tenant] += sign * job.work
        else:
            self.newcomers_bytes += size
            self._newcomer_bytes_of[tenant] += size
            self._tenant_work[tenant] += sign * job.work


def use_of(jobs: int, size: int, weight: float, limits: QueueLimits) -> float:
    """Return the larger of the shares of jobs and bytes, over the weight."""
    return max(jobs / limits.jobs, size / limits.bytes) / weight
