"""The rows of each tenant for its weight: whose sequence runs next, and whose is preempted for another tenant's.

A sequence may be preempted for one that waits where its tenant keeps at least as many rows, over its weight, as the
other tenant then has. So the two never take a row from each other by turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Ranked

from worker.engine.scheduling.sequence import Sequence

# Minimum number of tokens that a sequence makes before it is preempted for another tenant: what is computed again then
# is little beside what it has made.
RUN_TOKENS = 16


class RowShares:
    """The running sequences of each tenant."""

    def __init__(self, run_tokens: int = RUN_TOKENS) -> None:
        self._run_tokens = run_tokens
        self._rows: Counter[str] = Counter()

    def add(self, sequence: Sequence) -> None:
        """Count a sequence that runs from now on."""
        self._rows[sequence.spec.tenant] += 1

    def remove(self, sequence: Sequence) -> None:
        """Count a sequence that runs no more."""
        self._rows -= Counter((sequence.spec.tenant,))

    def with_one_more(self, sequence: Sequence) -> float:
        """Return the rows, over its weight, that the tenant of a waiting sequence has once that runs."""
        return (self._rows[sequence.spec.tenant] + 1) / sequence.spec.weight

    def last_of_largest(self, running: Iterable[Sequence]) -> Sequence:
        """Return of these sequences the last in rank of the tenant that has most rows for its weight."""
        return max(running, key=lambda one: (self._rows[one.spec.tenant] / one.spec.weight, one.rank))

    def candidates(self, sequence: Sequence, running: Ranked[Sequence]) -> list[Sequence]:
        """Return who may be preempted for a waiting sequence; `running` is in order of rank, and the first goes on."""
        least = self.with_one_more(sequence)
        return [
            one
            for one in running[1:]
            if one.answered - one.started_at >= self._run_tokens
            and (self._rows[one.spec.tenant] - 1) / one.spec.weight >= least
        ]

    def victims(self, sequence: Sequence, candidates: list[Sequence], rows: int, blocks: int) -> list[Sequence]:
        """Return whom of the candidates to preempt for so many rows and blocks; empty where all are not enough."""
        least, left, victims = self.with_one_more(sequence), self._rows.copy(), list[Sequence]()
        while rows > 0 or blocks > 0:
            victim, keeps = None, least
            for one in candidates:  # of equals the last in rank
                kept = (left[one.spec.tenant] - 1) / one.spec.weight
                if kept >= keeps and one not in victims:
                    victim, keeps = one, kept
            if victim is None:
                return []
            victims.append(victim)
            left[victim.spec.tenant] -= 1
            rows, blocks = rows - 1, blocks - len(victim.block_table)
        return victims
