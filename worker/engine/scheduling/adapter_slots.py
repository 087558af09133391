"""The device slots: which adapter is in which, which are pinned, and which one leaves next.

    nobody waits for it            goes first, least recently used of them
    later sequences wait for it    goes for a starved one, after its minimum residence
    pinned                         stays. A few slots drain while some are starved: they take no new pins
    kept by an operator            stays

A slot may go to another adapter as soon as it is unpinned, though a step that was launched ahead may still read it: on
the device the copy into it comes behind that step on the same stream, and on the CPU a launched step has run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from worker.engine.scheduling.adapter_demand import Demand, Urgency
from worker.engine.scheduling.adapter_tiers import require_integrity

# Minimum number of polls, which are steps, that an adapter for which a sequence waits stays in its slot.
MINIMUM_RESIDENCE = 16
# Maximum share of the slots that may drain at once: one in this many.
_DRAINING_SHARE = 8


@dataclass(slots=True)
class _Resident:
    slot: int
    size: int
    installed_at: int
    pins: int = 0


class DeviceSlots:
    """Slots 0 to count - 1. `now` counts polls; sizes are in bytes as stored."""

    def __init__(self, count: int, demand: Demand) -> None:
        self._demand = demand
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._drain_most = max(1, count // _DRAINING_SHARE)
        self._resident: dict[str, _Resident] = {}
        # Unpinned, least recently used first.
        self._idle: OrderedDict[str, None] = OrderedDict()
        self.draining: dict[str, None] = {}
        # Adapters that an operator keeps, whether they are in a slot or not.
        self.kept: dict[str, None] = {}
        self._most_kept = count - 1
        self.now = 0
        self.swaps = 0
        self.loads = 0
        self.bytes = 0
        self.digests: tuple[str, ...] = ()

    def __contains__(self, digest: str) -> bool:
        return digest in self._resident

    @property
    def used(self) -> int:
        """Return how many slots have an adapter."""
        return len(self._resident)

    @property
    def pinned(self) -> int:
        """Return how many slots are pinned, or kept by an operator."""
        return len(self._resident) - len(self._idle) + sum(digest in self._idle for digest in self.kept)

    def slot_of(self, digest: str) -> int | None:
        """Return an adapter's slot, or None where it can't be pinned now: not resident, or draining."""
        resident = self._resident.get(digest)
        return None if resident is None or digest in self.draining else resident.slot

    def pin(self, digest: str) -> int:
        """Keep an adapter in its slot until as many unpins. Raises KeyError where it is not resident."""
        resident = self._resident[digest]
        resident.pins += 1
        self._idle.pop(digest, None)
        return resident.slot

    def unpin(self, digest: str) -> None:
        """Undo one pin. Raises ValueError where there is none."""
        resident = self._resident[digest]
        if not resident.pins:
            raise ValueError(f"adapter {digest} is not pinned")
        resident.pins -= 1
        if not resident.pins:
            self._idle[digest] = None

    def keep(self, digest: str) -> None:
        """Never evict an adapter, once it is there. Raises ValueError where no slot would be left for others."""
        if digest not in self.kept and len(self.kept) >= self._most_kept:
            raise ValueError(f"{len(self.kept)} adapters are pinned; one of {self._most_kept + 1} slots is for others")
        self.kept[digest] = None

    def idle(self, digest: str) -> bool:
        """Tell whether an adapter is in a slot and not pinned."""
        return digest in self._idle

    def has_room(self) -> bool:
        """Tell whether any adapter would get a slot now."""
        return bool(self._free) or self._unwanted() is not None

    def claim_slot(self, digest: str) -> int | None:
        """Return an empty slot for this adapter, evicting another if need be; None where none can be had now."""
        if self._free:
            return self._free.pop()
        victim = self._unwanted() or self._yielding(digest)
        if victim is None:
            return None
        self.swaps += 1
        return self._evict(victim)

    def drop(self, digest: str) -> bool:
        """Empty the slot of an adapter, unless it is pinned, kept by an operator or waited for; returns whether."""
        if digest not in self._idle or digest in self.kept or self._demand.waiting_for(digest):
            return False
        self._free.append(self._evict(digest))
        return True

    def _evict(self, digest: str) -> int:
        """Forget an idle adapter; returns its slot."""
        resident = self._resident.pop(digest)
        del self._idle[digest]
        self.draining.pop(digest, None)
        self.bytes -= resident.size
        self.digests = tuple(self._resident)
        return resident.slot

    def occupy(self, digest: str, slot: int, size: int) -> None:
        """Record that an adapter was installed in a slot of claim_slot."""
        self._resident[digest] = _Resident(slot, size, self.now)
        self._idle[digest] = None
        self.loads += 1
        self.bytes += size
        self.digests = tuple(self._resident)

    def return_slot(self, slot: int) -> None:
        """Return a slot of claim_slot in which nothing was installed."""
        self._free.append(slot)

    def drain(self, starved: Sequence[str]) -> list[str]:
        """Let slots drain for starved adapters that got none; return the adapters that may stay after all."""
        if not (starved or self.draining):
            return []
        wanted = min(len(starved), self._drain_most)
        spared = list(self.draining)[wanted:]
        for digest in spared:
            del self.draining[digest]
        while len(self.draining) < wanted:
            candidates = [
                (resident.pins, digest)
                for digest, resident in self._resident.items()
                if resident.pins and digest not in self.draining and self._yields(digest, starved[len(self.draining)])
            ]
            if not candidates:
                break
            self.draining[min(candidates)[1]] = None
        return spared

    def check(self, pins: Mapping[str, int]) -> None:
        """Raise AdapterIntegrityError unless every slot is free or taken once, and exactly these pins are held."""
        residents = self._resident
        slots = sorted([*self._free, *(resident.slot for resident in residents.values())])
        require_integrity(slots == list(range(self._count)), f"slots are lost or taken twice: {slots}")
        pinned = {digest: resident.pins for digest, resident in residents.items() if resident.pins}
        require_integrity(pinned == dict(pins), f"sequences pin {dict(pins)}, the slots have {pinned}")
        require_integrity(self._idle.keys() == residents.keys() - pinned.keys(), "idle slots are not the unpinned ones")
        require_integrity(self.draining.keys() <= residents.keys(), "a slot without an adapter drains")
        size = sum(resident.size for resident in residents.values())
        require_integrity(size == self.bytes, f"{size} bytes are in slots, {self.bytes} counted")
        require_integrity(set(self.digests) == residents.keys(), "the reported adapters are not those in the slots")

    def _unwanted(self) -> str | None:
        return next((idle for idle in self._idle if idle not in self.kept and not self._demand.waiting_for(idle)), None)

    def _yielding(self, digest: str) -> str | None:
        if self._demand.urgency(digest) is Urgency.CALM:
            return None
        drained = next((idle for idle in self.draining if idle in self._idle), None)
        if drained is not None:
            return drained
        # The one whose waiting sequences came last.
        yields = [idle for idle in self._idle if self._yields(idle, digest)]
        return max(yields, key=self._demand.first_rank, default=None)

    def _yields(self, resident: str, starved: str) -> bool:
        """Tell whether a resident adapter, for which others may wait, leaves for a starved one."""
        if resident in self.kept:
            return False
        if self._demand.urgency(starved) is not Urgency.OVERDUE and (
            self._demand.urgency(resident) is Urgency.OVERDUE
            or self.now - self._resident[resident].installed_at < MINIMUM_RESIDENCE
        ):
            return False
        # Only later sequences wait for it: two starved adapters can't evict each other for ever.
        waiting = self._demand.waiting_for(resident)
        return not waiting or self._demand.first_rank(resident) > self._demand.first_rank(starved)
