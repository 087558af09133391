"""Sequences that run: they hold blocks and their adapter's slot, and lose both when they are preempted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from operator import attrgetter

from worker.engine.scheduling.blocks import BlockManager
from worker.engine.scheduling.residency import Residency
from worker.engine.scheduling.row_shares import RowShares
from worker.engine.scheduling.sequence import Sequence
from worker.engine.scheduling.waiting import WaitingSequences

by_rank = attrgetter("rank")


class RunningSequences:
    """Running sequences `in_rank`. The first one is preempted only where it is alone."""

    def __init__(
        self, blocks: BlockManager, waiting: WaitingSequences, residency: Residency, shares: RowShares
    ) -> None:
        self._blocks = blocks
        self._waiting = waiting
        self._residency = residency
        self._shares = shares
        self.in_rank: list[Sequence] = []
        # Sequences that had to give their row or their blocks to others, since the start.
        self.preemptions = 0

    def __len__(self) -> int:
        return len(self.in_rank)

    def start(self, sequence: Sequence) -> None:
        """Take the sequence that the waiting list has just let go, with its blocks."""
        sequence.started_at = sequence.answered
        insort(self.in_rank, sequence, key=by_rank)
        self._shares.add(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Free all that a running sequence holds."""
        self.in_rank.remove(sequence)
        self._shares.remove(sequence)
        self._blocks.release_blocks(sequence)
        sequence.stop()
        if sequence.spec.adapter:
            self._residency.unpin(sequence.spec.adapter.digest)

    def preempt(self, sequence: Sequence) -> None:
        """Let a running sequence wait again; it is computed from the start."""
        self.preemptions += 1
        self.stop(sequence)
        self._waiting.enter(sequence)

    def extend(self, sequence: Sequence) -> bool:
        """Give a sequence one more block, if need be of those after it in rank. False: it was preempted itself.

        The tenant that has most rows for its weight gives its last one.
        """
        while not self._blocks.extend(sequence):
            position = bisect_left(self.in_rank, sequence.rank, key=by_rank)
            last = self._shares.last_of_largest(self.in_rank[max(1, position) :] or [sequence])
            self.preempt(last)
            if last is sequence:
                return False
        return True

    def yield_to(self, sequence: Sequence, rows: int) -> None:
        """Preempt sequences of tenants above their share for one that waits, and lacks so many rows, or blocks.

        Nobody is preempted where that would not be enough.
        """
        candidates = self._shares.candidates(sequence, self.in_rank)
        if candidates:
            for victim in self._shares.victims(sequence, candidates, rows, self._blocks.shortage(sequence)):
                self.preempt(victim)

    def check(self) -> None:
        """Raise an integrity error unless exactly these sequences hold blocks and pins. Takes time O(blocks)."""
        self._blocks.check(self.in_rank)
        self._residency.check(Counter(running.spec.adapter.digest for running in self.in_rank if running.spec.adapter))
