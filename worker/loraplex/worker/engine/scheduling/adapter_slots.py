"""The demand of the waiting sequences for adapters, and the device slots: which adapter is in which, who leaves next.

A sequence is passed over when one that came later is admitted while it lacks nothing but a slot for its adapter. All
admissions of that time are counted, which is at least as many and needs no look at every sequence. The time in which an
adapter is being loaded does not count: a sequence waits for its own adapter's load only.

    starved: after half of PASSED_OVER_MOST   its adapter may take a slot that only later ones wait for, or that drains
    overdue: after PASSED_OVER_MOST           no later sequence is admitted before it

    nobody waits for it            goes first, least recently used of them
    later sequences wait for it    goes for a starved one, after its minimum residence
    pinned                         stays. A few slots drain while some are starved: they take no new pins
    kept by an operator            stays

A slot may go to another adapter as soon as it is unpinned, though a step that was launched ahead may still read it: on
the device the copy into it comes behind that step on the same stream, and on the CPU a launched step has run.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from loraplex.worker.engine.scheduling.sequence import Sequence


class AdapterIntegrityError(Exception):
    """The parts of the adapter cache do not agree; going on would compute sequences with the wrong adapter."""


def require_integrity(holds: bool, message: str) -> None:
    """Raise AdapterIntegrityError with the message unless `holds`."""
    if not holds:
        raise AdapterIntegrityError(message)


# Maximum number of later sequences that may be admitted before one that lacks only a slot.
PASSED_OVER_MOST = 64
# Number of adapters, the longest without a slot first, among which the one with most waiting sequences is chosen; it
# bounds a step's work.
WINDOW = 64

Rank = tuple[int, int]


class Urgency(IntEnum):
    """The urgency with which an adapter without a slot needs a slot."""

    CALM = 0
    STARVED = 1
    OVERDUE = 2


class Demand:
    """Waiting sequences by adapter; WaitingSequences writes it, the adapter cache reads it."""

    def __init__(self) -> None:
        # Ready and parked, by digest; dicts for their order and for removing in O(1).
        self._waiting: dict[str, dict[Sequence, None]] = {}
        # Parked ones; the value is the count of admissions at which its being passed over began.
        self._parked: dict[str, dict[Sequence, int]] = {}
        self._parked_count = 0
        # Digests of parked ones that lack only a slot, in the order in which that began, with the earliest such count.
        self._lacking: dict[str, int] = {}
        self._by_start: list[tuple[int, str]] = []
        self._overdue: set[str] = set()
        # Admissions that passed over sequences which were parked before and have become ready.
        self._carried: dict[Sequence, int] = {}
        self._admissions = 0

    @property
    def parked_count(self) -> int:
        """Return how many sequences are parked."""
        return self._parked_count

    @property
    def parked_digests(self) -> Set[str]:
        """Return the digests of the adapters that sequences are parked for."""
        return self._parked.keys()

    @property
    def lacking(self) -> Collection[str]:
        """Return the digests of the adapters that lack only a slot."""
        return self._lacking.keys()

    def waiting_for(self, digest: str) -> int:
        """Return how many sequences wait for the adapter, or for a row with it."""
        return len(self._waiting.get(digest, ()))

    def first_rank(self, digest: str) -> Rank:
        """Return the rank of the first sequence that waits with this adapter. Raises ValueError where none does."""
        return min(sequence.rank for sequence in self._waiting.get(digest, ()))

    def urgency(self, digest: str) -> Urgency:
        """Rate an adapter by the admissions since its first sequence lacks only a slot."""
        if digest in self._overdue:
            return Urgency.OVERDUE
        passed_over = self._admissions - self._lacking.get(digest, self._admissions)
        return Urgency.STARVED if passed_over >= PASSED_OVER_MOST // 2 else Urgency.CALM

    def order(self) -> Iterator[str]:
        """Return the adapters that lack a slot: those passed over long first, then by how many wait for them."""
        overdue = sorted(self._overdue, key=self.first_rank)
        window = [digest for digest in islice(self._lacking, WINDOW + len(overdue)) if digest not in self._overdue]
        starved = [digest for digest in window if self.urgency(digest) is Urgency.STARVED]
        calm = [digest for digest in window if self.urgency(digest) is Urgency.CALM]
        calm.sort(key=self.waiting_for, reverse=True)
        return iter(overdue + starved + calm)

    def barrier(self) -> Rank | None:
        """Return the rank behind which no sequence may be admitted now, or None."""
        return min(map(self.first_rank, self._overdue)) if self._overdue else None

    def enter(self, sequence: Sequence, digest: str) -> None:
        """Count a sequence that begins to wait."""
        self._waiting.setdefault(digest, {})[sequence] = None

    def leave(self, sequence: Sequence, digest: str) -> None:
        """Forget a sequence that waits no more."""
        if sequence in self._parked.get(digest, ()):
            self._unpark(digest, [sequence])
        self._carried.pop(sequence, None)
        waiting = self._waiting[digest]
        del waiting[sequence]
        if not waiting:
            del self._waiting[digest]

    def admitted(self) -> None:
        """Count an admission, which passes over all that lack only a slot."""
        self._admissions += 1
        while self._by_start and self._admissions - self._by_start[0][0] >= PASSED_OVER_MOST:
            start, digest = heapq.heappop(self._by_start)
            if self._lacking.get(digest) == start:
                self._overdue.add(digest)

    def park(self, sequence: Sequence, digest: str) -> None:
        """Take a waiting sequence whose adapter is not in a slot."""
        parked = self._parked.setdefault(digest, {})
        parked[sequence] = self._admissions
        self._parked_count += 1
        if digest in self._lacking:
            parked[sequence] -= self._carried.pop(sequence, 0)
            if parked[sequence] < self._lacking[digest]:
                self._starts(digest, parked[sequence])

    def parked(self, digest: str) -> list[Sequence]:
        """Return the sequences that are parked for this adapter."""
        return list(self._parked.get(digest, ()))

    def unpark(self, digest: str) -> list[Sequence]:
        """Return the sequences that were parked for an adapter, which is now in a slot."""
        sequences = self.parked(digest)
        self._unpark(digest, sequences)
        return sequences

    def lacks_slot(self, digest: str) -> None:
        """Mark an adapter as loaded: from now on its sequences are passed over."""
        parked = self._parked.get(digest)
        if not parked or digest in self._lacking:
            return
        for sequence in parked:
            # Admissions that passed it over before still count.
            parked[sequence] = self._admissions - self._carried.pop(sequence, 0)
        self._starts(digest, min(parked.values()))

    def _starts(self, digest: str, start: int) -> None:
        self._lacking[digest] = start
        if len(self._by_start) > 2 * len(self._lacking) + WINDOW:
            # Most entries are of sequences that left without having been admitted.
            self._by_start = [(other, name) for name, other in self._lacking.items()]
            heapq.heapify(self._by_start)
        else:
            heapq.heappush(self._by_start, (start, digest))
        if self._admissions - start >= PASSED_OVER_MOST:
            self._overdue.add(digest)
        else:
            self._overdue.discard(digest)

    def _unpark(self, digest: str, sequences: list[Sequence]) -> None:
        parked = self._parked.get(digest, {})
        for sequence in sequences:
            start = parked.pop(sequence)
            if digest in self._lacking:
                self._carried[sequence] = self._admissions - start
        self._parked_count -= len(sequences)
        if not parked:
            self._parked.pop(digest, None)
            self._lacking.pop(digest, None)
            self._overdue.discard(digest)
        elif digest in self._lacking and min(parked.values()) > self._lacking[digest]:
            # The sequence that had waited longest has left.
            self._starts(digest, min(parked.values()))


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

    def drain(self, starved: list[str]) -> list[str]:
        """Let slots drain for starved adapters that got none; return the adapters that may stay after all."""
        if not (starved or self.draining):
            return []
        most = min(len(starved), self._drain_most)
        spared = list(self.draining)[most:]
        for digest in spared:
            del self.draining[digest]
        while len(self.draining) < most:
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
