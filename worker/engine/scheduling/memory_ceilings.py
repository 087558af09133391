"""Ceilings of a step's size: they fall when a step runs out of memory, and rise again as sequences end."""

from __future__ import annotations

from worker.engine.scheduling.batch import Batch
from worker.engine.scheduling.running import RunningSequences, by_rank
from worker.engine.scheduling.sequence import Sequence
from worker.engine_api.config import EngineLimits


class MemoryCeilings:
    """The maximum number of running sequences, and of tokens in a step's chunks."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._unlimited_tokens = limits.rows * limits.max_tokens
        self.rows = limits.rows
        self.chunk_tokens = self._unlimited_tokens

    def lower(self, batch: Batch, running: RunningSequences) -> Sequence | None:
        """Make the next batch smaller than this one, for which memory was not enough; return one that was alone.

        Where chunks were most of it, they are halved from now on; else the last sequence in rank is preempted, and its
        place stays empty.
        """
        chunk_tokens = batch.tokens - batch.decodes
        if chunk_tokens > batch.decodes:
            self.chunk_tokens = chunk_tokens // 2
            return None
        last = max((row.sequence for row in batch.rows), key=by_rank)
        if len(batch.rows) == 1:
            return last
        running.preempt(last)
        self.rows = len(running)
        return None

    def lift(self) -> None:
        """Allow one more sequence and twice the tokens, because a sequence has ended and freed its memory."""
        self.rows = min(self.rows + 1, self._limits.rows)
        self.chunk_tokens = min(2 * self.chunk_tokens, self._unlimited_tokens)
