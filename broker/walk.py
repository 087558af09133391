"""The twin's claim: one walk over the waiting jobs for one worker; `broker.claims` does the same on Redis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from broker import terms
from broker.messages import Capacity
from broker.terms import Entry
from broker.waiting import WaitingJob, WaitingJobs


class ChargeClaim(Protocol):
    """Charges a tenant for a claim; `loads`: the worker has to load the adapter."""

    def __call__(self, one: WaitingJob, *, loads: bool) -> None: ...


class _Tenant:
    def __init__(self, counter: float, name: str) -> None:
        self.counter = counter
        self.name = name
        self.passed = 0
        self.done = False


class Walk:
    """Takes what suits, and passes over the rest. `rows` are those still free."""

    def __init__(
        self,
        waiting: WaitingJobs,
        worker: str,
        base_digest: str,
        capacity: Capacity,
        rooms: Mapping[str, int],
        now_ms: int,
        skip: int,
    ) -> None:
        self._waiting = waiting
        self._worker = worker
        self._base = base_digest
        self._capacity = capacity
        self._resident = frozenset(capacity.adapters)
        self._rooms = rooms
        self._now_ms = now_ms
        self._skip = skip
        self._first = skip == 0
        self._free = capacity.tokens
        self._passes, self._ahead = terms.PASS_WINDOW, terms.AHEAD_WINDOW
        self._wanted: dict[bytes, int] = {}
        self.rows = capacity.rows
        self.taken: list[str] = []
        self.work = 0
        self.hold_ms = 0
        self.saturated = False

    def run(self, charge: ChargeClaim) -> int:
        """Walk. Answers how many tenants the next walk is to skip, where this one found nothing within its windows."""
        for _, job_id in self._waiting.again[: terms.AGAIN_WINDOW]:
            if not self._may_look():
                break
            self._look(job_id, charge)
        counters = self._waiting.counters
        near = [_Tenant(*one) for one in counters.first(self._skip, terms.TENANTS_WINDOW)]
        beyond = near[-1].counter if len(near) == terms.TENANTS_WINDOW else math.inf
        walked = 0
        while True:
            open_ones = [tenant for tenant in near if not tenant.done]
            # The earlier one of equals, as min does.
            tenant = min(open_ones, key=lambda one: one.counter, default=None)
            if tenant is None or tenant.counter > beyond or not self._may_look():
                break
            queue = self._waiting.queue(tenant.name)
            if not self._look(queue[tenant.passed][1], charge):
                tenant.passed += 1
                self._passes -= 1
            tenant.counter = counters.of(tenant.name)
            if tenant.passed >= terms.TENANT_WINDOW or tenant.passed >= len(self._waiting.queue(tenant.name)):
                tenant.done = True
                walked += 1
        if self.rows < 1:
            self.saturated = True
        if not self.taken and self.rows > 0 and (beyond < math.inf or self._passes < 1):
            return self._skip + max(walked, 1)
        return 0

    def most_wanted(self) -> tuple[bytes, ...]:
        """The adapters that most of those wait for that did not fit."""
        return tuple(sorted(self._wanted, key=lambda one: -self._wanted[one])[: terms.WANTED_LIMIT])

    def _may_look(self) -> bool:
        if self.rows > 0:
            return self._passes > 0
        self._ahead -= 1
        return self._ahead >= 0

    def _look(self, job_id: str, charge: ChargeClaim) -> bool:
        """Whether the job left the queue; else it was passed over."""
        one = self._waiting.get(job_id)
        assert one is not None, "a queue has only jobs that wait"
        if one.deadline_ms <= self._now_ms:
            self._waiting.forget(job_id)
            return True
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
