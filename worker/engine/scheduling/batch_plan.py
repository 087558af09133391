"""The batch of a step while it is being scheduled."""

from __future__ import annotations

from operator import attrgetter

from worker.engine.scheduling.batch import Batch, Row
from worker.engine.scheduling.chunk_sizer import ChunkBudget
from worker.engine.scheduling.sequence import Sequence

_by_slot = attrgetter("sequence.adapter_slot")


class BatchPlan:
    """Rows of one id and chunks of prompts, in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.singles: list[Row] = []
        self._chunks: list[Row] = []

    def add_row(self, sequence: Sequence, count: int) -> None:
        """Add a sequence's next `count` ids: they count as computed, and a placeholder follows if one is sampled."""
        start = sequence.computed
        sequence.computed = start + count
        samples = sequence.computed == sequence.length
        sequence.placeholders += samples
        (self.singles if count == 1 else self._chunks).append(Row(sequence, start, count, samples, sequence.epoch))

    def add_chunk(self, sequence: Sequence, budget: ChunkBudget) -> None:
        """Add as many of a sequence's next ids as the budget allows, if any."""
        count = budget.take(sequence.computed, sequence.length - sequence.computed)
        if count:
            self.add_row(sequence, count)

    def batch(self) -> Batch | None:
        """Return the batch, or None where there are no rows."""
        if not self.singles and not self._chunks:
            return None
        self.singles.sort(key=_by_slot)
        self._chunks.sort(key=_by_slot)
        tokens = len(self.singles) + sum(row.count for row in self._chunks)
        return Batch((*self.singles, *self._chunks), len(self.singles), tokens)
