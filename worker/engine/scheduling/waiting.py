"""Sequences that do not run yet: ready ones in order of rank, parked ones by the adapter they wait for."""

from __future__ import annotations

from bisect import bisect_left, insort

from worker.engine.scheduling.residency import Residency
from worker.engine.scheduling.sequence import Sequence, SequenceState


def _last_first(sequence: Sequence) -> tuple[int, int]:
    return (-sequence.rank[0], -sequence.rank[1])


class WaitingSequences:
    """Keeps a sequence whose adapter is not there out of the way of those behind it; for how long: demand.py."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._demand = residency.demand
        # The first in rank comes last, where it is cheap to take.
        self._ready: list[Sequence] = []
        # Sequences with an adapter that found it in a slot when they came, and those that did not.
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._ready) + self._demand.parked_count

    @property
    def any_ready(self) -> bool:
        """Whether head would look at any."""
        return bool(self._ready)

    @property
    def ready(self) -> int:
        """How many head would look at."""
        return len(self._ready)

    def enter(self, sequence: Sequence) -> None:
        """Take a sequence in; asks for its adapter where it is not there."""
        adapter = sequence.spec.adapter
        if adapter is None:
            self._make_ready(sequence)
            return
        self._demand.enter(sequence, adapter.digest)
        there = self._residency.slot_of(adapter.digest) is not None
        if sequence.cached_tokens is None:  # else it ran before
            self.hits += there
            self.misses += not there
        if there:
            self._make_ready(sequence)
        else:
            self._park(sequence)

    def head(self, tries: int) -> Sequence | None:
        """The first in rank that may run now, its adapter in a slot; looks at `tries` at most."""
        for _ in range(min(tries, len(self._ready))):
            sequence = self._ready[-1]
            adapter = sequence.spec.adapter
            if adapter is None or self._residency.slot_of(adapter.digest) is not None:
                barrier = self._demand.barrier()
                return sequence if barrier is None or sequence.rank < barrier else None
            # Evicted since it became ready.
            self._ready.pop()
            self._park(sequence)
        return None

    def take_head(self) -> None:
        """Let go of the sequence that head has just returned; its adapter is pinned."""
        sequence = self._ready.pop()
        sequence.move_to(SequenceState.RUNNING)
        adapter = sequence.spec.adapter
        if adapter:
            sequence.adapter_slot = self._residency.pin(adapter.digest)
            self._demand.leave(sequence, adapter.digest)
        self._demand.admitted()

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that waits, because it ends."""
        adapter = sequence.spec.adapter
        if sequence.state is SequenceState.READY:
            del self._ready[bisect_left(self._ready, _last_first(sequence), key=_last_first)]
        sequence.move_to(SequenceState.ENDED)
        if adapter:
            self._demand.leave(sequence, adapter.digest)
            if not self._demand.parked(adapter.digest):
                self._residency.withdraw(adapter.digest)

    def arrived(self, digest: str) -> None:
        """Its adapter is there: all that were parked for it are ready."""
        for sequence in self._demand.unpark(digest):
            self._make_ready(sequence)

    def parked_for(self, digest: str) -> list[Sequence]:
        """Those that wait for this adapter to arrive."""
        return self._demand.parked(digest)

    def _make_ready(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceState.READY)
        insort(self._ready, sequence, key=_last_first)

    def _park(self, sequence: Sequence) -> None:
        adapter = sequence.spec.adapter
        if adapter is None:
            raise ValueError(f"sequence {sequence.sequence_id} has no adapter to wait for")
        sequence.move_to(SequenceState.PARKED)
        self._demand.park(sequence, adapter.digest)
        self._residency.request(adapter)
