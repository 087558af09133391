"""Lets waiting sequences run: of the tenant that has fewest rows for its weight the first in rank, and so on."""

from __future__ import annotations

from collections.abc import Callable, Collection

from worker.engine.scheduling.blocks import BlockManager
from worker.engine.scheduling.memory_ceilings import MemoryCeilings
from worker.engine.scheduling.running import RunningSequences
from worker.engine.scheduling.sequence import Sequence
from worker.engine.scheduling.statistics import Counters
from worker.engine.scheduling.waiting import WaitingSequences


class Admission:
    """The way of a scheduler's sequences from waiting to running. A step parks at most `tries` sequences."""

    def __init__(
        self,
        waiting: WaitingSequences,
        running: RunningSequences,
        blocks: BlockManager,
        ceilings: MemoryCeilings,
        counters: Counters,
        on_begun: Callable[[str], None],
        tries: int,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._blocks = blocks
        self._ceilings = ceilings
        self._counters = counters
        self._on_begun = on_begun
        self._tries = tries

    def make_room(self) -> None:
        """Let the next sequence that waits take the row and blocks that it lacks from tenants above their share."""
        sequence = self._waiting.head(self._tries)
        if sequence is not None:
            self._running.yield_to(sequence, len(self._running) + 1 - self._ceilings.rows)

    def admit(self, passed: Collection[str] = ()) -> Sequence | None:
        """Let the next sequence run that waits, but none of the tenants `passed`; None where rows or blocks lack."""
        if len(self._running) >= self._ceilings.rows:
            return None
        sequence = self._waiting.head(self._tries)
        if sequence is not None and sequence.spec.tenant in passed and self._blocks.shortage(sequence) <= 0:
            sequence = self._waiting.head(self._tries, passed)
        # A sequence that waits for blocks is not overtaken: a long prompt might wait for ever.
        if sequence is None or sequence.spec.tenant in passed or not self._blocks.allocate(sequence):
            return None
        self._waiting.take(sequence)
        if sequence.cached_tokens is None:
            self._on_begun(sequence.sequence_id)
            sequence.cached_tokens = sequence.computed
            self._counters.prefix_queries += len(sequence.ids)
            self._counters.prefix_hits += sequence.computed
        self._running.start(sequence)
        return sequence
