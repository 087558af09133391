"""What one step computes."""

from __future__ import annotations

from dataclasses import dataclass

from worker.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence's share of a step: its ids from `start`, `count` of them, and whether the next one is sampled."""

    sequence: Sequence
    start: int
    count: int
    samples: bool

    @property
    def prompt_positions(self) -> range:
        """Positions of the step whose logits tell a log probability of the prompt that is still missing."""
        missing = self.sequence.missing_prompt_logprobs
        first = max(self.start, missing.start)
        return range(first, max(first, min(self.start + self.count, missing.stop)))


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step: first the `decodes` rows of one id, then the longer ones, each part sorted by adapter_slot.

    `tokens` is the sum of the rows' counts. Every row's blocks hold its positions up to start + count.
    """

    rows: tuple[Row, ...]
    decodes: int
    tokens: int
