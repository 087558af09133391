"""The queue's policy in Python: the twin of the scripts of `broker.queue` and `broker.claims`, decision for decision.

It serves simulations, and tests drive both and compare. Time is what the caller says, in milliseconds. Nothing expires
by itself: whoever lets a worker die says so with `lose`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.queue_model.claim_scan import Round, Walk
from bench.queue_model.live_routers import Routers
from bench.queue_model.waiting_jobs import WaitingJob, WaitingJobs
from broker import terms
from broker.messages import Capacity, Job
from broker.terms import Entry, Placement, QueueLimits, Usage


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job was not let in: the bound of QueueLimits that is reached, or `late` with the wait."""

    why: str
    wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What a claim gives: see `broker.terms.Claimed`."""

    job_ids: tuple[str, ...]
    waiting: int
    wanted: tuple[bytes, ...]
    hold_ms: int


@dataclass(frozen=True, slots=True)
class _Charged:
    tenant: str
    weight: float
    attempt: int
    tokens: int
    prompt: float


@dataclass(slots=True)
class _Pace:
    since_ms: int
    work: int = 0
    per_ms: float = 0.0


class Cell:
    """One cell's queue."""

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self.waiting = WaitingJobs()
        self._limits = limits or QueueLimits()
        self._charged: dict[str, _Charged] = {}
        # Free rows after each worker's last claim.
        self._rooms: dict[str, int] = {}
        self._routers = Routers()
        # How many scans each worker made, and how many tenants its last claim passed over without finding anything.
        self._turns: Counter[str] = Counter()
        self._skips: dict[str, int] = {}
        self._pace: _Pace | None = None
        self._arrivals = 0

    def counter(self, tenant: str) -> float:
        """What a tenant was served, in charged tokens over its weight."""
        return self.waiting.counters.of(tenant)

    def enqueue(self, job: Job, placement: Placement, now_ms: int) -> Refusal | None:
        """Put a job in; a newer attempt takes an older one's place. First attempts alone are refused."""
        self.router_beats(job.reply_to, now_ms)
        held = self.waiting.get(job.job_id)
        if held is not None and held.entry.attempt >= job.attempt:
            return None
        if held is not None:
            self.waiting.forget(job.job_id)
        entry = Entry.from_job(job, placement)
        first = entry.attempt == 1
        refusal = self._bound_reached(entry) if first else None
        if refusal is not None:
            return refusal
        self._arrivals += 1
        deadline = now_ms + job.deadline_ms if job.deadline_ms else math.inf
        place = (-entry.priority, deadline, self._arrivals) if first else (0, 0.0, self._arrivals)
        one = WaitingJob(job.job_id, entry, place, now_ms, deadline)
        if first and job.deadline_ms:
            wait_ms = self._wait_ms(one, now_ms)
            if wait_ms > terms.DEADLINE_DOUBT * job.deadline_ms:
                return Refusal("late", math.floor(wait_ms))
        self.waiting.add(one)
        return None

    def _bound_reached(self, entry: Entry) -> Refusal | None:
        size, limits, waiting = len(entry.body), self._limits, self.waiting
        if len(waiting) >= limits.jobs:
            return Refusal("jobs")
        if waiting.bytes + size > limits.bytes:
            return Refusal("bytes")
        if len(waiting.queue(entry.tenant)) >= limits.tenant_jobs:
            return Refusal("tenant_jobs")
        if waiting.bytes_of(entry.tenant) + size > limits.tenant_bytes:
            return Refusal("tenant_bytes")
        return None

    def _wait_ms(self, one: WaitingJob, now_ms: int) -> float:
        """Until its turn, as though the whole cell worked for this tenant; 0 where nothing tells."""
        tenant, pace = one.entry.tenant, self._pace
        best = pace.per_ms if pace else 0.0
        if pace and now_ms - pace.since_ms >= terms.CLAIM_RATE_MIN_MS:
            best = max(best, pace.work / (now_ms - pace.since_ms))
        queued = len(self.waiting.queue(tenant))
        if not queued or best <= 0:
            return 0.0
        return self.waiting.ahead_of(one) * self.waiting.work_of(tenant) / queued / best

    def claim(self, worker: str, base_digest: str, capacity: Capacity, now_ms: int) -> Decision:
        """Take the next jobs that suit a worker."""
        hold_ms, wanted, taken = 0, tuple[bytes, ...](), tuple[str, ...]()
        skip: int | None = 0
        for scan in range(terms.SCANS_PER_CLAIM):
            for late in self.waiting.expired(now_ms, terms.EXPIRED_PER_SCAN):
                self.waiting.forget(late)
            one = Round(worker, base_digest, capacity, now_ms, self._turns[worker], skip or 0)
            walk = Walk(self.waiting, self._routers, self._rooms, one)
            skip = walk.run(self._charge_claim)
            self._turns[worker] += 1
            self._measure(walk, now_ms)
            self._rooms[worker] = max(walk.rows, 0)
            hold_ms = min(hold_ms or walk.hold_ms, walk.hold_ms or hold_ms)
            wanted, taken = wanted or walk.most_wanted(), tuple(walk.taken)
            if skip is None:
                break
            skip = max(skip, self._skips.get(worker, 0)) if scan == 0 else skip
        self._skips[worker] = skip or 0
        return Decision(taken, len(self.waiting), wanted, hold_ms)

    def router_beats(self, router: str, now_ms: int) -> None:
        """A router lives; an enqueue says so too. What waits for one that does not is dropped."""
        self._routers.beats(router, now_ms)

    def lose(self, worker: str) -> None:
        """A worker has not claimed for long: nothing is held for it."""
        self._rooms.pop(worker, None)

    def _measure(self, walk: Walk, now_ms: int) -> None:
        if not len(self.waiting) or not walk.saturated:
            self._pace = None
        elif self._pace is None:
            self._pace = _Pace(now_ms)
        elif now_ms - self._pace.since_ms >= terms.CLAIM_RATE_MS:
            self._pace = _Pace(now_ms, 0, (self._pace.work + walk.work) / (now_ms - self._pace.since_ms))
        else:
            self._pace.work += walk.work

    def _charge_claim(self, one: WaitingJob, *, loads: bool) -> None:
        """What it costs the tenant. A job that was claimed before has been charged."""
        entry, cost = one.entry, 0.0
        if entry.attempt == 1:
            if one.job_id in self._charged:
                return
            cost = terms.PROMPT_WEIGHT * entry.prompt / entry.weight
            self.waiting.counters.charge(entry.tenant, cost + (entry.load / entry.weight if loads else 0))
        self._charged[one.job_id] = _Charged(entry.tenant, entry.weight, entry.attempt, 0, cost)

    def charge(self, reports: Sequence[Usage]) -> None:
        """Charge tenants what their jobs made since the last report."""
        for one in reports:
            known = self._charged.get(one.job_id)
            if known is None or known.attempt != one.attempt:
                continue
            counters, made = self.waiting.counters, one.tokens - known.tokens
            if made > 0:
                counters.charge(known.tenant, terms.OUTPUT_WEIGHT * made / known.weight)
                self._charged[one.job_id] = replace(known, tokens=one.tokens)
            if one.ended:
                if not one.ran:
                    counters.charge(known.tenant, -known.prompt)
                del self._charged[one.job_id]

    def finish(self, job_id: str, attempt: int) -> None:
        """Forget a job that waits, up to this attempt."""
        held, known = self.waiting.get(job_id), self._charged.get(job_id)
        if held is not None and held.entry.attempt <= attempt:
            self.waiting.forget(job_id)
        if known is not None and known.attempt <= attempt:
            del self._charged[job_id]
