"""The demand of the waiting sequences for adapters, and how often each sequence was passed over.

A sequence is passed over when one that came later is admitted while it lacks nothing but a slot for its adapter. All
admissions of that time are counted, which is at least as many and needs no look at every sequence. The time in which an
adapter is being loaded does not count: a sequence waits for its own adapter's load only.

    starved: after half of PASSED_OVER_MOST   its adapter may take a slot that only later ones wait for, or that drains
    overdue: after PASSED_OVER_MOST           no later sequence is admitted before it
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Set
from enum import IntEnum
from itertools import islice

from worker.engine.scheduling.sequence import Sequence

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
