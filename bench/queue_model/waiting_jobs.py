"""The twin's waiting jobs: each tenant's queue, those that were dispatched again, and what they come to."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from bench.queue_model.tenant_counters import Counters
from broker import terms
from broker.terms import Entry

# Priority, highest first, then deadline, then arrival.
Place = tuple[int, float, int]


@dataclass(slots=True, eq=False)
class WaitingJob:
    """A job that waits. Lower places come first; `reserved` is the worker that makes room for it."""

    job_id: str
    entry: Entry
    place: Place
    queued_ms: int
    deadline_ms: float
    reserved: str | None = None
    reserved_until_ms: int = 0

    @property
    def work(self) -> int:
        """What it comes to in charged tokens, were the answer of its full length."""
        entry = self.entry
        return terms.PROMPT_WEIGHT * entry.prompt + terms.OUTPUT_WEIGHT * (entry.tokens - entry.prompt)


class WaitingJobs:
    """All of a cell."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.bytes = 0
        self.again: list[tuple[Place, str]] = []
        self._jobs: dict[str, WaitingJob] = {}
        self._queues: dict[str, list[tuple[Place, str]]] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._bytes_of: defaultdict[str, int] = defaultdict(int)
        self._work_of: defaultdict[str, int] = defaultdict(int)

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, job_id: str) -> WaitingJob | None:
        """A job that waits."""
        return self._jobs.get(job_id)

    def queue(self, tenant: str) -> Sequence[tuple[Place, str]]:
        """A tenant's jobs in their order, but for those dispatched again."""
        return self._queues.get(tenant, ())

    def bytes_of(self, tenant: str) -> int:
        """What a tenant's jobs take."""
        return self._bytes_of[tenant]

    def work_of(self, tenant: str) -> int:
        """The sum of the work of a tenant's jobs."""
        return self._work_of[tenant]

    def ahead_of(self, one: WaitingJob) -> int:
        """How many jobs of its tenant would come before this one."""
        return bisect_left(self.queue(one.entry.tenant), (one.place, one.job_id))

    def expired(self, now_ms: int, most: int) -> list[str]:
        """Those whose deadline has passed, the earliest first."""
        return [job_id for deadline, job_id in self._deadlines[:most] if deadline <= now_ms]

    def add(self, one: WaitingJob) -> None:
        """One more."""
        tenant = one.entry.tenant
        self._jobs[one.job_id] = one
        self._count(one, 1)
        if one.deadline_ms < math.inf:
            insort(self._deadlines, (one.deadline_ms, one.job_id))
        if one.entry.attempt == 1:
            insort(self._queues.setdefault(tenant, []), (one.place, one.job_id))
            self.counters.enter(tenant)
        else:
            insort(self.again, (one.place, one.job_id))

    def forget(self, job_id: str) -> None:
        """It waits no more, whatever the reason."""
        one = self._jobs.pop(job_id)
        tenant = one.entry.tenant
        self._count(one, -1)
        if one.deadline_ms < math.inf:
            del self._deadlines[bisect_left(self._deadlines, (one.deadline_ms, job_id))]
        queue = self._queues[tenant] if one.entry.attempt == 1 else self.again
        del queue[bisect_left(queue, (one.place, job_id))]
        if one.entry.attempt == 1 and not queue:
            del self._queues[tenant]
            self.counters.leave(tenant)

    def _count(self, one: WaitingJob, sign: int) -> None:
        tenant, size = one.entry.tenant, sign * len(one.entry.body)
        self.bytes += size
        self._bytes_of[tenant] += size
        self._work_of[tenant] += sign * one.work
