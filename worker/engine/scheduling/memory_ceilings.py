"""Ceilings of a step's size: they fall when a step runs out of memory, and rise again as sequences end."""

from __future__ import annotations

from worker.engine_api.config import EngineLimits


class MemoryCeilings:
    """The maximum number of running sequences, and of tokens in a step's chunks."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._unlimited_tokens = limits.rows * limits.max_tokens
        self.rows = limits.rows
        self.chunk_tokens = self._unlimited_tokens

    def halve_chunks(self, tokens: int) -> None:
        """Allow half of the `tokens` for which memory was not enough."""
        self.chunk_tokens = tokens // 2

    def keep_rows(self, rows: int) -> None:
        """Allow as many sequences as still run, so that the place of a preempted one is not taken."""
        self.rows = rows

    def lift(self) -> None:
        """Allow one more sequence and twice the tokens, because a sequence has ended and freed its memory."""
        self.rows = min(self.rows + 1, self._limits.rows)
        self.chunk_tokens = min(2 * self.chunk_tokens, self._unlimited_tokens)
