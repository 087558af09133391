"""Adapters in three tiers: files, host memory, device slots; brought in beside the batch.

              loader thread                     loader thread (CUDA)        step thread, in poll
 request ──▶ wanted ──▶ loading ──▶ host tier, held ──▶ transfer ──▶ copied ──▶ resident ──pin──▶ pinned ──unpin──▶ idle
                         read()                          transfer()   install(), within the swap budget         │
                                    host tier, kept while its budget allows ◀────────── evicted ◀───────────────┘

What the sequences wait for decides which adapter is next, and which one leaves: reads.py, slots.py,
scheduling/adapter_demand.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from worker.engine.adapter_cache.host_tier import HostTier
from worker.engine.adapter_cache.integrity import require_integrity
from worker.engine.adapter_cache.loading import AdapterMemory, Loads
from worker.engine.adapter_cache.reads import Reads
from worker.engine.adapter_cache.slots import DeviceSlots
from worker.engine.adapter_cache.swap_budget import SwapBudget
from worker.engine.adapter_cache.transfers import Transfers
from worker.engine.scheduling.adapter_demand import Demand, Urgency
from worker.engine.scheduling.residency import Arrivals
from worker.engine_api import AdapterSource
from worker.engine_api.stats import TierStats

P = TypeVar("P")


class AdapterCache(Generic[P]):
    """Keeps adapters in slots 0 to slots - 1; see worker.engine.scheduling.residency.Residency."""

    def __init__(
        self,
        slots: int,
        memory: AdapterMemory[P],
        loads: Loads[P],
        host_bytes: int,
        budget: SwapBudget | None = None,
    ) -> None:
        self.demand = Demand()
        self._memory = memory
        self._loads = loads
        self._host: HostTier[P] = HostTier(host_bytes, memory.size)
        self._slots = DeviceSlots(slots, self.demand)
        self._budget = budget or SwapBudget()
        self._transfers = Transfers(memory, loads)
        self._reads = Reads(memory, loads, self._host, self._transfers, self.demand)
        # Arrivals that the next poll returns.
        self._arrived: list[str] = []
        self._load_failures = 0
        self._failed: list[tuple[str, Exception]] = []

    def request(self, source: AdapterSource) -> None:
        """Bring an adapter in, unless that is under way; poll reports when it is there."""
        digest = source.digest
        if digest not in self._reads.loading and self._host.hold(digest):
            self.demand.lacks_slot(digest)
        else:
            self._reads.request(source)

    def withdraw(self, digest: str) -> None:
        """Stop bringing in an adapter that nobody waits for any more; one that is being read is kept in host memory."""
        self._drop_request(digest)
        self._reads.feed()

    def slot_of(self, digest: str) -> int | None:
        """Return an adapter's slot, or None where it can't be pinned now: not resident, or draining."""
        return self._slots.slot_of(digest)

    def pin(self, digest: str) -> int:
        """Keep an adapter in its slot until as many unpins. Raises KeyError where it is not resident."""
        return self._slots.pin(digest)

    def unpin(self, digest: str) -> None:
        """Undo one pin. Raises ValueError where there is none."""
        self._slots.unpin(digest)
        self._host.touch(digest)

    def poll(self, *, busy: bool = False) -> Arrivals:
        """Put what has been loaded into slots, the most urgent first; `busy`: sequences run, which that delays."""
        self._slots.now += 1
        self._budget.begin_poll(busy=busy)
        if self._loads.has_ended():
            for digest, result in self._loads.ended():
                self._take(digest, result)
        if (lacking := self._lacking()) or self._slots.draining:
            self._install_waiting(lacking)
        self._reads.feed()
        arrivals = Arrivals(tuple(self._arrived), tuple(self._failed))
        self._arrived, self._failed = [], []
        return arrivals

    def has_work(self) -> bool:
        """Tell whether poll would do anything now; asked while nothing runs, so that no budget counts."""
        if self._loads.has_ended():
            return True
        # A slot that has drained goes to the adapter it drained for, or takes pins again.
        if any(map(self._slots.idle, self._slots.draining)) and not self._transfers.any_under_way:
            return True
        movable = (digest not in self._slots and self._transfers.can_move(digest) for digest in self._lacking())
        return any(movable) and self._slots.has_room()

    @property
    def used(self) -> int:
        """Return how many slots have an adapter."""
        return self._slots.used

    @property
    def pinned(self) -> int:
        """Return how many slots are pinned."""
        return self._slots.pinned

    @property
    def resident(self) -> tuple[str, ...]:
        """Return the digests of the adapters in the slots."""
        return self._slots.digests

    @property
    def tiers(self) -> TierStats:
        """Return what the tiers hold now."""
        slots, host, loading = self._slots, self._host, len(self._reads.loading)
        return TierStats(slots.loads, slots.swaps, self._load_failures, loading, host.bytes, slots.bytes)

    def check(self, pins: Mapping[str, int]) -> None:
        """Raise AdapterIntegrityError unless tiers, slots, requests and demand agree, and exactly `pins` are held."""
        self._host.check()
        self._slots.check(pins)
        # Nobody waits for what the next poll returns.
        settled = {*self._arrived, *(digest for digest, _ in self._failed)}
        wanted = self._requested() - settled
        places = [*self._reads.requested, *self._host.held_digests]
        require_integrity(sorted(places) == sorted(wanted), f"{wanted} are requested, and {places} are on their way")
        lacking = set(self.demand.lacking) - settled
        held = self._host.held_digests & self.demand.parked_digests
        require_integrity(held == lacking, f"{held} are in host memory and waited for, but {lacking} lack a slot")
        require_integrity(self._transfers.copied <= self._host.held_digests, "a copy for a slot is not held")

    def close(self) -> None:
        """End the loads, after what is under way."""
        self._loads.close()

    def _requested(self) -> set[str]:
        """Return the digests of all adapters that are to be brought in."""
        return set(self.demand.parked_digests)

    def _take(self, digest: str, result: P | Exception) -> None:
        if digest in self._reads.loading:
            wanted = self._reads.end(digest, result)
        else:
            wanted = self._host.held(digest) is not None
            if wanted and not isinstance(result, Exception):
                self._transfers.complete(digest, result)
            else:
                self._transfers.forget(digest)
        if not wanted or not isinstance(result, Exception):
            return
        self._host.let_go(digest)
        if digest in self._slots:  # it drains; sequences that wait for it can use it as it is
            self._slots.draining.pop(digest, None)
            self._arrived.append(digest)
        else:
            self._fail(digest, result)

    def _fail(self, digest: str, error: Exception) -> None:
        self._failed.append((digest, error))
        self._load_failures += 1

    def _lacking(self) -> list[str]:
        """Return the adapters that lack only a slot, the most urgent first."""
        return list(self.demand.order())

    def _install_waiting(self, lacking: list[str]) -> None:
        starved: list[str] = []
        first = room = True
        for digest in lacking:
            urgency = self.demand.urgency(digest)
            if digest in self._slots:  # it drains for another one
                if urgency is Urgency.OVERDUE and not starved:
                    self._spare(digest)
                continue
            if urgency is Urgency.CALM and not room:
                break
            prepared = self._transfers.installable(digest, self._host.held(digest), first=first)
            first = False
            allowed = self._budget.allows() or urgency is Urgency.OVERDUE
            slot = self._slots.claim_slot(digest) if prepared is not None and allowed else None
            if prepared is not None and slot is not None:
                self._put(digest, prepared, slot)
                continue
            room = room and prepared is None
            if urgency is not Urgency.CALM and not self._slots.has_room():
                starved.append(digest)
        for digest in self._slots.drain(starved):
            self._spare(digest)

    def _put(self, digest: str, prepared: P, slot: int) -> None:
        try:
            with self._budget.spending():
                self._memory.install(prepared, slot)
        except Exception as error:  # any: it belongs to this adapter alone
            self._slots.return_slot(slot)
            self._fail(digest, error)
        else:
            self._slots.occupy(digest, slot, self._memory.size(prepared))
            self._arrived.append(digest)
        self._drop_request(digest)

    def _spare(self, digest: str) -> None:
        """Let a draining slot take pins again."""
        self._slots.draining.pop(digest, None)
        if self.demand.parked(digest):
            self._drop_request(digest)
            self._arrived.append(digest)

    def _drop_request(self, digest: str) -> None:
        self._reads.drop_request(digest)
        self._transfers.discard(digest)
        self._host.let_go(digest)
