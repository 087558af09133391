"""The rows that one step computes."""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence's share of a step: its ids from `start`, `count` of them, and whether the next one is sampled.

    The last of these ids may be a placeholder: what the step before this one samples.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    # The sequence's when this was scheduled.
    epoch: int = 0

    @property
    def live(self) -> bool:
        """Tell whether the sequence has run without a stop since, so that this row's result is of use."""
        return self.epoch == self.sequence.epoch

    @property
    def answered(self) -> int:
        """Return how many tokens of the answer come before the one that is sampled."""
        return self.start + self.count - self.sequence.prompt_length

    @property
    def last_is_placeholder(self) -> bool:
        """Tell whether the last of its ids is not known yet; a row's other ids are."""
        return self.start + self.count > len(self.sequence.ids)

    @property
    def prompt_positions(self) -> range:
        """Return the positions of this row whose logits give a log probability of the prompt that is still missing."""
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

    def unschedule(self) -> None:
        """Take the rows back from their sequences: this batch, the last one that was scheduled, does not run."""
        for row in self.rows:
            row.sequence.computed = row.start
            row.sequence.placeholders -= row.samples
