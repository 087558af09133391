"""What a scheduler asks of a drafter, which guesses the next ids of sequences: a package at the edge, loaded by name.

A draft cannot change an answer: its rows are computed like any others, and count where it was right (sequence.py).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Ids
from importlib import import_module
from typing import Protocol

from loraplex.worker.engine.scheduling.batch import Batch
from loraplex.worker.engine.scheduling.sequence import Sequence
from loraplex.worker.engine_api import Removal, Speculation

# Module of the drafter.
_SPECULATION = "loraplex.speculation"


class Drafter(Protocol):
    """Guesses the next ids of sequences where that is worth the rows. One thread."""

    def propose(self, sequences: list[Sequence], rows: int, free: int) -> Ids[Ids[int]]:
        """Return a draft for each sequence, perhaps empty, of `free` ids together at most.

        The step has `rows` rows of one id without them. Of a step in flight the ids are missing still.
        """

    def observe(self, batch: Batch) -> None:
        """Learn that a step has ended, and so how long it took."""

    def learn(self, sequence: Sequence, checked: int, accepted: int) -> None:
        """Learn that of so many drafted ids, whose predecessors all came, these came too."""

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""

    def forget_tenant(self, tenant: str, kept_adapters: Container[str], running: Iterable[Sequence]) -> Removal:
        """Forget the answers of a tenant, and of adapters that are not kept; those of sequences that run, as they end.

        These count as left.
        """


def make_drafter(speculation: Speculation | None, clock: Callable[[], float]) -> Drafter | None:
    """Make a drafter as configured; `clock` tells the seconds of steps."""
    if speculation is None:
        return None
    drafter: Drafter = import_module(_SPECULATION).SuffixDrafter(speculation, clock)
    return drafter
