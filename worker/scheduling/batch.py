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


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step: first the `decodes` rows of one id, then the longer ones, each part sorted by adapter_slot.

    `tokens` is the sum of the rows' counts. Every row's blocks hold its positions up to start + count.
    """

    rows: tuple[Row, ...]
    decodes: int
    tokens: int
