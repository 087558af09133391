"""Adapters in three tiers: files, host memory, device slots; brought in beside the batch.

              loader thread                     loader thread (CUDA)        step thread, in poll
 request ──▶ wanted ──▶ loading ──▶ host tier, held ──▶ staging ──▶ staged ──▶ resident ──pin──▶ pinned ──unpin──▶ idle
                         read()                          stage()      install(), within the swap budget         │
                                    host tier, kept while its budget allows ◀────────── evicted ◀───────────────┘

Which adapter is next, and who goes for it, follows from who waits for what: worker.engine.scheduling.adapter_demand,
slots.py.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from worker.engine.adapter_cache.host_tier import HostTier
from worker.engine.adapter_cache.loading import AdapterMemory, Loads
from worker.engine.adapter_cache.slots import DeviceSlots
from worker.engine.adapter_cache.swap_budget import SwapBudget
from worker.engine.scheduling.adapter_demand import WINDOW, Demand, Urgency
from worker.engine.scheduling.residency import Arrivals
from worker.engine_api import AdapterSource, TierStats

P = TypeVar("P")

# So many may wait for a slot whatever the host budget says, and so many on the device: bounds what is held twice.
AHEAD = 2


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
        self._wanted: dict[str, AdapterSource] = {}
        self._oldest_next = False
        # Whether somebody still waits for what is being read.
        self._loading: dict[str, bool] = {}
        self._largest = 0
        # On its way to the device: None until it is there.
        self._staged: dict[str, P | None] = {}
        # What the next poll returns.
        self._arrived: list[str] = []
        self._failed: list[tuple[str, Exception]] = []

    def request(self, source: AdapterSource) -> None:
        """Have it brought in; poll tells when it is there. Nothing happens where that is under way already."""
        digest = source.digest
        if digest in self._loading:
            self._loading[digest] = True
        elif self._host.hold(digest):
            self.demand.lacks_slot(digest)
        else:
            self._wanted[digest] = source
            self._feed()

    def withdraw(self, digest: str) -> None:
        """Nobody waits for it any more: it is not read, or only to be kept in host memory."""
        self._drop_request(digest)
        self._feed()

    def slot_of(self, digest: str) -> int | None:
        """Its slot, or None where it can't be pinned now: not resident, or draining."""
        return self._slots.slot_of(digest)

    def pin(self, digest: str) -> int:
        """Keep it in its slot until as many unpins. Raises KeyError where it is not resident."""
        return self._slots.pin(digest)

    def unpin(self, digest: str) -> None:
        """Undo one pin. Raises ValueError where there is none."""
        self._slots.unpin(digest)
        self._host.touch(digest)

    def poll(self, *, busy: bool = False) -> Arrivals:
        """Put what has been loaded into slots, the most urgent first; `busy`: sequences run, which that delays."""
        self._slots.now += 1
        self._budget.begin(busy=busy)
        if self._loads.has_ended():
            for digest, result in self._loads.ended():
                self._take(digest, result)
        if (lacking := self._lacking()) or self._slots.draining:
            self._install_waiting(lacking)
        self._feed()
        arrivals = Arrivals(tuple(self._arrived), tuple(self._failed))
        self._arrived, self._failed = [], []
        return arrivals

    def has_work(self) -> bool:
        """Whether poll would do anything now; asked while nothing runs, so that no budget counts."""
        if self._loads.has_ended():
            return True
        # A slot that has drained goes to whom it drained for, or takes pins again.
        if any(map(self._slots.idle, self._slots.draining)) and None not in self._staged.values():
            return True
        return any(map(self._can_move, self._lacking())) and self._slots.has_room()

    @property
    def used(self) -> int:
        """Slots with an adapter."""
        return self._slots.used

    @property
    def pinned(self) -> int:
        """Slots that are pinned."""
        return self._slots.pinned

    @property
    def resident(self) -> tuple[str, ...]:
        """Digests of the adapters in the slots."""
        return self._slots.digests

    @property
    def tiers(self) -> TierStats:
        """What the tiers hold now."""
        return TierStats(self._slots.loads, self._slots.swaps, len(self._loading), self._host.bytes, self._slots.bytes)

    def close(self) -> None:
        """End the loads, after what is under way."""
        self._loads.close()

    def _feed(self) -> None:
        # Slow files must not keep adapters from the device that are in memory already.
        most = self._loads.most - self._memory.stages
        while self._wanted and (ahead := len(self._loading) + 1) <= most:
            # A reservation of the largest so far for each load: it ends with the load, whatever comes of that.
            if not self._host.has_room_for(ahead, self._largest, AHEAD):
                return
            # What is still on its way to the device for somebody who left is read again once it is there.
            window = [digest for digest in islice(self._wanted, WINDOW) if digest not in self._staged]
            if not window:
                return
            # In turn the one for which most wait and the one that was asked for first: nobody waits for ever.
            digest = window[0] if self._oldest_next else max(window, key=self.demand.waiting_for)
            self._oldest_next = not self._oldest_next
            self._loading[digest] = True
            self._loads.start(digest, partial(self._memory.read, self._wanted.pop(digest)))

    def _take(self, digest: str, result: P | Exception) -> None:
        if digest in self._loading:
            wanted = self._loading.pop(digest)
            if not isinstance(result, Exception):
                self._largest = max(self._largest, self._memory.size(result))
                if wanted:
                    self._host.hold(digest, result)
                    self.demand.lacks_slot(digest)
                else:
                    self._host.put(digest, result)
                return
        else:
            wanted = self._host.held(digest) is not None
            if wanted and not isinstance(result, Exception):
                self._staged[digest] = result
                return
            self._staged.pop(digest, None)
        if not wanted or not isinstance(result, Exception):
            return
        self._host.release(digest)
        if digest in self._slots:  # it drains; who came for it meanwhile can have it as it is
            self._slots.draining.pop(digest, None)
            self._arrived.append(digest)
        else:
            self._failed.append((digest, result))

    def _lacking(self) -> list[str]:
        """Adapters that lack only a slot, the most urgent first."""
        return list(self.demand.order())

    def _install_waiting(self, lacking: list[str]) -> None:
        starved: list[str] = []
        first = room = True
        for digest in lacking:
            urgency = self.demand.urgency(digest)
            if digest in self._slots:  # it drains, for one that comes first or may wait longer
                if urgency is Urgency.OVERDUE and not starved:
                    self._spare(digest)
                continue
            if urgency is Urgency.CALM and not room:
                break
            prepared = self._ready(digest, first=first)
            first = False
            allowed = self._budget.allows() or urgency is Urgency.OVERDUE
            slot = self._slots.take(digest) if prepared is not None and allowed else None
            if prepared is not None and slot is not None:
                self._put(digest, prepared, slot)
                continue
            room = room and prepared is None
            if urgency is not Urgency.CALM and not self._slots.has_room():
                starved.append(digest)
        for digest in self._slots.drain(starved):
            self._spare(digest)

    def _ready(self, digest: str, *, first: bool) -> P | None:
        """What can be installed now; starts to stage it where that is needed."""
        if not self._memory.stages:
            return self._host.held(digest)
        if digest not in self._staged:
            held = self._host.held(digest)
            # The first one always may: it must not wait for a place of those that wait for a slot.
            if held is not None and (first or len(self._staged) < AHEAD):
                self._staged[digest] = None
                self._loads.start(digest, partial(self._memory.stage, held))
        return self._staged.get(digest)

    def _can_move(self, digest: str) -> bool:
        if digest in self._slots:
            return False
        if not self._memory.stages or self._staged.get(digest) is not None:
            return True
        return digest not in self._staged and len(self._staged) < AHEAD

    def _put(self, digest: str, prepared: P, slot: int) -> None:
        try:
            with self._budget.spending():
                self._memory.install(prepared, slot)
        except Exception as error:  # any: it belongs to this adapter alone
            self._slots.give_back(slot)
            self._failed.append((digest, error))
        else:
            self._slots.put(digest, slot, self._memory.size(prepared))
            self._arrived.append(digest)
        self._drop_request(digest)

    def _spare(self, digest: str) -> None:
        """A slot that drained takes pins again."""
        self._slots.draining.pop(digest, None)
        if self.demand.parked(digest):
            self._drop_request(digest)
            self._arrived.append(digest)

    def _drop_request(self, digest: str) -> None:
        self._wanted.pop(digest, None)
        if digest in self._loading:
            self._loading[digest] = False
        if self._staged.get(digest) is not None:
            del self._staged[digest]
        self._host.release(digest)
