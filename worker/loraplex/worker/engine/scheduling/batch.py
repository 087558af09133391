"""The rows of a step: what it computes of each sequence.

A draft guesses the next ids, and the same step checks it, by rows of one id each:

    row        the last id    draft[0]     draft[1]      each samples the id after its own, as it would without a draft
    samples    draft[0]       another id   (dropped)     and counts while all drafted ids up to it are those that came
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from loraplex.worker.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence's share of a step: its ids from `start`, `count` of them, and whether the next one is sampled.

    The last of these ids may be a placeholder: what the step before this one samples. One computes them all: the base
    model or an adapter.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    # The sequence's when this was scheduled.
    epoch: int = 0
    # The ids that are guessed to follow the sequence's. The row of its last id is followed by one for each of them,
    # which are at `place` 1, 2, ... and have the id before their place.
    draft: tuple[int, ...] = ()
    place: int = 0

    @property
    def adapter_slot(self) -> int:
        """Return the slot of the adapter that computes it; -1: the plain base model."""
        return -1 if self.start < self.sequence.spec.invoked_at else self.sequence.adapter_slot

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
        return not self.place and self.start + self.count > len(self.sequence.ids)

    @property
    def known_ids(self) -> list[int]:
        """Return its ids, but for a placeholder."""
        return [*self.sequence.ids[self.start : self.start + self.count], *self.drafted[-1:]]

    @property
    def drafted(self) -> tuple[int, ...]:
        """Return the ids between the sequence's and the one that is sampled: the draft as far as this row."""
        return self.draft[: self.place]

    @property
    def banned_ids(self) -> frozenset[int]:
        """Return the ids that may not be sampled."""
        return self.sequence.banned_ids(self.answered, self.drafted)

    @property
    def takes_draft(self) -> bool:
        """Tell whether rows with a draft may follow it: it has the sequence's last id, and tokens are due after it."""
        sequence = self.sequence
        due = sequence.max_tokens - sequence.answered
        known = self.start + 1 == len(sequence.ids)
        return due > 1 and known and self.samples and not self.place and sequence.spec.speculate

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

    def live(self) -> Batch:
        """Return the rows of sequences that were not stopped since."""
        rows = tuple(row for row in self.rows if row.live)
        return Batch(rows, sum(row.count == 1 for row in rows), sum(row.count for row in rows))

    def unschedule(self) -> None:
        """Take the rows back from their sequences: this batch, the last one that was scheduled, does not run."""
        for row in reversed(self.rows):
            row.sequence.computed = row.start
            row.sequence.placeholders -= row.samples


_by_slot = attrgetter("adapter_slot")


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

    @property
    def followable(self) -> Iterable[Row]:
        """Return the rows that a draft may follow; none beside chunks, which take as long as they may already."""
        return (row for row in self.singles if not self._chunks and row.takes_draft)

    def add_drafts(self, drafts: Mapping[Sequence, tuple[int, ...]]) -> None:
        """Let rows for each id of a draft follow that of its sequence's last id."""
        singles, self.singles = self.singles, []
        for row in singles:
            draft = drafts.get(row.sequence, ())
            row.sequence.computed += len(draft)
            row.sequence.placeholders += len(draft)
            self.singles += [
                replace(row, start=row.start + place, draft=draft, place=place) for place in range(len(draft) + 1)
            ]

    def batch(self) -> Batch | None:
        """Return the batch, or None where there are no rows."""
        if not self.singles and not self._chunks:
            return None
        self.singles.sort(key=_by_slot)
        self._chunks.sort(key=_by_slot)
        tokens = len(self.singles) + sum(row.count for row in self._chunks)
        return Batch((*self.singles, *self._chunks), len(self.singles), tokens)
