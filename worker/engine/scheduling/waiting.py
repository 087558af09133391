"""Sequences that do not run yet: ready ones by tenant and rank, parked ones by the adapter they wait for."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection

from worker.engine.scheduling.residency import Residency
from worker.engine.scheduling.row_shares import RowShares
from worker.engine.scheduling.sequence import Sequence, SequenceState


def _last_first(sequence: Sequence) -> tuple[int, int]:
    return (-sequence.rank[0], -sequence.rank[1])


class WaitingSequences:
    """Lets sequences pass one whose adapter is not in a slot; adapter_demand.py bounds how many."""

    def __init__(self, residency: Residency, shares: RowShares) -> None:
        self._residency = residency
        self._demand = residency.demand
        self._shares = shares
        # Ready sequences by tenant. The first in rank comes last, where it is cheap to take.
        self._ready: dict[str, list[Sequence]] = {}
        self._ready_count = 0
        # Counts of sequences whose adapter was, and was not, in a slot when they came.
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return self._ready_count + self._demand.parked_count

    @property
    def any_ready(self) -> bool:
        """Tell whether any sequence is ready."""
        return self._ready_count > 0

    @property
    def ready(self) -> int:
        """Return how many sequences are ready."""
        return self._ready_count

    def enter(self, sequence: Sequence) -> None:
        """Take a sequence that is to wait, and request its adapter where it is not in a slot."""
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

    def head(self, tries: int, passed: Collection[str] = ()) -> Sequence | None:
        """Return the next ready sequence if it may run now, its adapter in a slot; parks at most `tries` others.

        Those of the tenants `passed` are passed over.
        """
        for _ in range(min(tries, self._ready_count)):
            sequence = self._next_ready(passed)
            if sequence is None:
                return None
            adapter = sequence.spec.adapter
            if adapter is None or self._residency.slot_of(adapter.digest) is not None:
                return sequence
            # Its adapter was evicted since it became ready.
            self._unready(sequence)
            self._park(sequence)
        return None

    def _next_ready(self, passed: Collection[str]) -> Sequence | None:
        """Return the first in rank of the tenant that has fewest rows for its weight; None behind the barrier."""
        firsts = [sequences[-1] for tenant, sequences in self._ready.items() if tenant not in passed]
        barrier = self._demand.barrier()
        if barrier is not None:
            firsts = [first for first in firsts if first.rank < barrier]
        return min(firsts, key=lambda first: (self._shares.with_one_more(first), first.rank), default=None)

    def take(self, sequence: Sequence) -> None:
        """Let the sequence run that head has just returned, and pin its adapter."""
        self._unready(sequence)
        sequence.move_to(SequenceState.RUNNING)
        adapter = sequence.spec.adapter
        if adapter:
            sequence.adapter_slot = self._residency.pin(adapter.digest)
            self._demand.leave(sequence, adapter.digest)
        self._demand.admitted()

    def _unready(self, sequence: Sequence) -> None:
        sequences = self._ready[sequence.spec.tenant]
        del sequences[bisect_left(sequences, _last_first(sequence), key=_last_first)]
        if not sequences:
            del self._ready[sequence.spec.tenant]
        self._ready_count -= 1

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that waits, because it ends."""
        adapter = sequence.spec.adapter
        if sequence.state is SequenceState.READY:
            self._unready(sequence)
        sequence.move_to(SequenceState.ENDED)
        if adapter:
            self._demand.leave(sequence, adapter.digest)
            if not self._demand.parked(adapter.digest):
                self._residency.withdraw(adapter.digest)

    def arrived(self, digest: str) -> None:
        """Make all sequences ready that were parked for an adapter, which is now in a slot."""
        for sequence in self._demand.unpark(digest):
            self._make_ready(sequence)

    def parked_for(self, digest: str) -> list[Sequence]:
        """Return the sequences that are parked for this adapter."""
        return self._demand.parked(digest)

    def _make_ready(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceState.READY)
        insort(self._ready.setdefault(sequence.spec.tenant, []), sequence, key=_last_first)
        self._ready_count += 1

    def _park(self, sequence: Sequence) -> None:
        adapter = sequence.spec.adapter
        if adapter is None:
            raise ValueError(f"sequence {sequence.sequence_id} has no adapter to wait for")
        sequence.move_to(SequenceState.PARKED)
        self._demand.park(sequence, adapter.digest)
        self._residency.request(adapter)
