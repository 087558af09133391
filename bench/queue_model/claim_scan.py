"""The twin's claim: one walk over the waiting jobs for one worker; `broker.claims` does the same on Redis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from bench.queue_model.live_routers import Routers
from bench.queue_model.waiting_jobs import Place, WaitingJob, WaitingJobs
from broker import terms
from broker.messages import Capacity
from broker.terms import Entry


class ChargeClaim(Protocol):
    """Charges a tenant for a claim; `loads`: the worker has to load the adapter."""

    def __call__(self, one: WaitingJob, *, loads: bool) -> None: ...


class _Tenant:
    def __init__(self, counter: float, name: str) -> None:
        self.counter = counter
        self.name = name
        self.passed = 0
        # Of the job that comes next.
        self.place = 0
        self.done = False


@dataclass(frozen=True, slots=True)
class Round:
    """One scan: for whom and when, `turn` is its number among this worker's, `skip` how many tenants to pass over."""

    worker: str
    base_digest: str
    capacity: Capacity
    now_ms: int
    turn: int
    skip: int


class Walk:
    """Takes what suits, and passes over the rest. `rows` are those still free."""

    def __init__(self, waiting: WaitingJobs, routers: Routers, rooms: Mapping[str, int], scan: Round) -> None:
        self._waiting = waiting
        self._routers = routers
        self._rooms = rooms
        self._worker = scan.worker
        self._base = scan.base_digest
        self._capacity = scan.capacity
        self._resident = frozenset(scan.capacity.adapters)
        self._now_ms = scan.now_ms
        self._turn = scan.turn
        self._skip = scan.skip
        self._first = scan.skip == 0
        self._free = scan.capacity.tokens
        self._passes, self._ahead = terms.PASSES_PER_SCAN, terms.LOOKAHEAD_LIMIT
        # Whether a queue is longer than its window.
        self._deeper = False
        self._wanted: dict[bytes, int] = {}
        self.rows = scan.capacity.rows
        self.taken: list[str] = []
        self.work = 0
        self.hold_ms = 0
        self.saturated = False

    def run(self, charge: ChargeClaim) -> int | None:
        """Walk. Answers how many tenants the next scan is to skip; None: there is no reason for one."""
        for _, job_id in self._again():
            if not self._may_look():
                break
            self._look(job_id, charge)
        counters = self._waiting.counters
        near = [_Tenant(*one) for one in counters.first(self._skip, terms.TENANTS_PER_SCAN)]
        beyond = near[-1].counter if len(near) == terms.TENANTS_PER_SCAN else math.inf
        walked = 0
        while True:
            open_ones = [tenant for tenant in near if not tenant.done]
            # The earlier one of equals, as min does.
            tenant = min(open_ones, key=lambda one: one.counter, default=None)
            if tenant is None or tenant.counter > beyond or not self._may_look():
                break
            self._serve(tenant, charge)
            walked += tenant.done and bool(self._waiting.queue(tenant.name))
        if self.rows < 1:
            self.saturated = True
        more = self._passes < 1 or beyond < math.inf
        if self.taken or self.rows < 1 or not (more or self._deeper):
            return None
        return self._skip + walked if more else 0

    def _again(self) -> list[tuple[Place, str]]:
        """The jobs that were dispatched again, as far as this scan sees them."""
        again, window = self._waiting.again, terms.REDISPATCHED_PER_SCAN
        if len(again) <= window:
            return list(again)
        place = self._turn_to(len(again), window)
        return again[: window // 2] + again[place : place + window // 2]

    def _serve(self, tenant: _Tenant, charge: ChargeClaim) -> None:
        """Look at a tenant's next job."""
        taken = self._look(self._waiting.queue(tenant.name)[tenant.place][1], charge)
        left, window = len(self._waiting.queue(tenant.name)), terms.PASSES_PER_TENANT
        if not taken:
            self._passes -= 1
        if taken is False:
            tenant.passed += 1
            tenant.place += 1
            if tenant.passed == window // 2 and left > window:
                tenant.place = self._turn_to(left, window)
        tenant.counter = self._waiting.counters.of(tenant.name)
        tenant.done = tenant.passed >= window or tenant.place >= left

    def _turn_to(self, length: int, window: int) -> int:
        """Where this scan goes on in a queue of which it has seen the first half of the window."""
        self._deeper = True
        return window // 2 + self._turn * window // 2 % (length - window // 2)

    def most_wanted(self) -> tuple[bytes, ...]:
        """The adapters that most of those wait for that did not fit."""
        return tuple(sorted(self._wanted, key=lambda one: -self._wanted[one])[: terms.ADAPTER_REQUESTS_LIMIT])

    def _may_look(self) -> bool:
        if self.rows > 0:
            return self._passes > 0
        self._ahead -= 1
        return self._ahead >= 0

    def _look(self, job_id: str, charge: ChargeClaim) -> bool | None:
        """Whether the job left the queue for this worker; False: it was passed over; None: it is gone."""
        one = self._waiting.get(job_id)
        assert one is not None, "a queue has only jobs that wait"
        if one.deadline_ms <= self._now_ms or not self._routers.lives(one.entry.router, self._now_ms):
            self._waiting.forget(job_id)
            return None
        if not self._suits(one):
            return False
        entry, need = one.entry, min(one.entry.rows, self._capacity.rows_limit)
        in_turn = self._first or one.reserved == self._worker
        overdue = in_turn and self._now_ms - one.queued_ms >= terms.PATIENCE_MS
        self._first = False
        if need <= self.rows and (entry.prefill <= self._free or overdue):
            self.rows -= need
            self._free -= entry.prefill
            self.work += one.work
            self.taken.append(job_id)
            charge(one, loads=entry.adapter not in self._resident)
            self._waiting.forget(job_id)
            return True
        self.saturated = True
        if entry.wanted:
            self._wanted[entry.wanted] = self._wanted.get(entry.wanted, 0) + 1
        if overdue and self.rows > 0:
            one.reserved, one.reserved_until_ms = self._worker, self._now_ms + terms.RESERVE_MS
            self.rows = 0
        return False

    def _suits(self, one: WaitingJob) -> bool:
        entry, capacity = one.entry, self._capacity
        if entry.tokens > capacity.max_tokens or entry.rank > capacity.max_rank or entry.base != self._base:
            return False
        if one.reserved not in (None, self._worker) and one.reserved_until_ms > self._now_ms:
            return False
        held_ms = self._held_for_ms(one, entry)
        if held_ms > 0:
            self.hold_ms = min(self.hold_ms or held_ms, held_ms)
        return held_ms <= 0

    def _held_for_ms(self, one: WaitingJob, entry: Entry) -> int:
        """How long it still waits for a worker that its adapter prefers and that has room."""
        left = one.queued_ms + terms.HOLD_MS - self._now_ms
        if not entry.adapter or entry.attempt > 1 or entry.adapter in self._resident or left <= 0:
            return 0
        for other in filter(None, entry.prefer.split("\n")):
            if other == self._worker:
                return 0
            if self._rooms.get(other, 0) > 0:
                return left
        return 0
