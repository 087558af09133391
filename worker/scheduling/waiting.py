"""Sequences that do not run yet: ready ones in order of rank, parked ones by the adapter they wait for."""

from __future__ import annotations

from bisect import bisect_left, insort

from worker.scheduling.residency import Residency
from worker.scheduling.sequence import Sequence


def _last_first(sequence: Sequence) -> tuple[int, int]:
    return (-sequence.rank[0], -sequence.rank[1])


class WaitingSequences:
    """Keeps a sequence whose adapter is not there out of the way of those behind it."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        # The first in rank comes last, where it is cheap to take.
        self._ready: list[Sequence] = []
        # By digest; a dict for its order and for removing in O(1).
        self._parked: dict[str, dict[Sequence, None]] = {}
        # How many wait, ready or parked, by digest.
        self._waiting: dict[str, int] = {}
        self._parked_count = 0

    def __len__(self) -> int:
        return len(self._ready) + self._parked_count

    @property
    def any_ready(self) -> bool:
        """Whether head would look at any."""
        return bool(self._ready)

    def enter(self, sequence: Sequence) -> None:
        """Take a sequence in; asks for its adapter where it is not there."""
        adapter = sequence.spec.adapter
        if adapter:
            self._waiting[adapter.digest] = self._waiting.get(adapter.digest, 0) + 1
            if self._residency.slot_of(adapter.digest) is None:
                self._park(sequence)
                return
        insort(self._ready, sequence, key=_last_first)

    def head(self, tries: int) -> Sequence | None:
        """The first in rank whose adapter can be pinned now; looks at `tries` at most."""
        for _ in range(min(tries, len(self._ready))):
            sequence = self._ready[-1]
            adapter = sequence.spec.adapter
            if adapter is None or self._residency.slot_of(adapter.digest) is not None:
                return sequence
            # Evicted since it became ready.
            self._ready.pop()
            self._park(sequence)
        return None

    def take_head(self) -> None:
        """Let go of the sequence that head has just returned; its adapter is pinned."""
        sequence = self._ready.pop()
        adapter = sequence.spec.adapter
        if adapter:
            sequence.adapter_slot = self._residency.pin(adapter.digest)
            self._forget(adapter.digest)

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that waits."""
        adapter = sequence.spec.adapter
        if adapter is None or sequence not in self._parked.get(adapter.digest, ()):
            del self._ready[bisect_left(self._ready, _last_first(sequence), key=_last_first)]
        else:
            self._unpark(adapter.digest, [sequence])
        if adapter and not self._forget(adapter.digest):
            self._residency.withdraw(adapter.digest)

    def arrived(self, digest: str) -> None:
        """Its adapter is there: all that were parked for it are ready."""
        for sequence in self._unpark(digest, list(self._parked.get(digest, ()))):
            insort(self._ready, sequence, key=_last_first)

    def parked_for(self, digest: str) -> list[Sequence]:
        """Those that wait for this adapter to arrive."""
        return list(self._parked.get(digest, ()))

    def _park(self, sequence: Sequence) -> None:
        adapter = sequence.spec.adapter
        if adapter is None:
            raise ValueError(f"sequence {sequence.sequence_id} has no adapter to wait for")
        sequence.park()
        self._parked.setdefault(adapter.digest, {})[sequence] = None
        self._parked_count += 1
        self._residency.request(adapter)

    def _unpark(self, digest: str, sequences: list[Sequence]) -> list[Sequence]:
        parked = self._parked.get(digest, {})
        for sequence in sequences:
            sequence.unpark()
            del parked[sequence]
        self._parked_count -= len(sequences)
        if not parked:
            self._parked.pop(digest, None)
        return sequences

    def _forget(self, digest: str) -> int:
        left = self._waiting.pop(digest) - 1
        if left:
            self._waiting[digest] = left
        return left
