"""Decides who runs: sequences that wait, sequences that run, the rows of each tenant for its weight, and all rows.

A sequence may be preempted for one that waits where its tenant keeps at least as many rows, over its weight, as the
other tenant then has. So the two never take a row from each other by turns.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Ranked
from operator import attrgetter
from typing import Any

from loraplex.worker.engine.scheduling.adapter_cache import AdapterCache
from loraplex.worker.engine.scheduling.batch import Batch
from loraplex.worker.engine.scheduling.blocks import BlockManager
from loraplex.worker.engine.scheduling.sequence import Sequence, SequenceState
from loraplex.worker.engine_api import EngineLimits

# Minimum number of tokens that a sequence makes before it is preempted for another tenant: what is computed again then
# is little beside what it has made.
RUN_TOKENS = 16


class RowShares:
    """The running sequences of each tenant: whose sequence runs next, and whose is preempted for another tenant's."""

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
        least, rows_of, victims = self.with_one_more(sequence), self._rows.copy(), list[Sequence]()
        while rows > 0 or blocks > 0:
            victim, keeps = None, least
            for one in candidates:  # of equals the last in rank
                share = (rows_of[one.spec.tenant] - 1) / one.spec.weight
                if share >= keeps and one not in victims:
                    victim, keeps = one, share
            if victim is None:
                return []
            victims.append(victim)
            rows_of[victim.spec.tenant] -= 1
            rows, blocks = rows - 1, blocks - len(victim.block_table)
        return victims


def _last_first(sequence: Sequence) -> tuple[int, int]:
    return (-sequence.rank[0], -sequence.rank[1])


class WaitingSequences:
    """Sequences that do not run yet: ready ones by tenant and rank, parked ones by the adapter they wait for.

    Sequences may pass one whose adapter is not in a slot; adapter_slots.py bounds how many.
    """

    def __init__(self, adapters: AdapterCache[Any], shares: RowShares) -> None:
        self._adapters = adapters
        self._demand = adapters.demand
        self._shares = shares
        # Ready sequences by tenant. The first in rank comes last, where it is cheap to take.
        self._ready: dict[str, list[Sequence]] = {}
        self._ready_count = 0
        # Counts of sequences whose adapter was, and was not, in a slot when they came.
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return self._ready_count + self._demand.parked_count

    @property
    def ready(self) -> int:
        """Return how many sequences are ready."""
        return self._ready_count

    def enter(self, sequence: Sequence) -> None:
        """Take a sequence that is to wait, and request its adapter where it is not in a slot."""
        adapter = sequence.spec.adapter
        if adapter is None:
            self._make_ready(sequence)
            return
        self._demand.enter(sequence, adapter.digest)
        there = self._adapters.slots.slot_of(adapter.digest) is not None
        if sequence.cached_tokens is None:  # else it ran before
            self.hits += there
            self.misses += not there
        if there:
            self._make_ready(sequence)
        else:
            self._park(sequence)

    def head(self, tries: int, passed: Collection[str] = ()) -> Sequence | None:
        """Return the next ready sequence if it may run now, its adapter in a slot; parks at most `tries` others.

        Those of the tenants `passed` are passed over.
        """
        for _ in range(min(tries, self._ready_count)):
            sequence = self._next_ready(passed)
            if sequence is None:
                return None
            adapter = sequence.spec.adapter
            if adapter is None or self._adapters.slots.slot_of(adapter.digest) is not None:
                return sequence
            # Its adapter was evicted since it became ready.
            self._unready(sequence)
            self._park(sequence)
        return None

    def _next_ready(self, passed: Collection[str]) -> Sequence | None:
        """Return the first in rank of the tenant that has fewest rows for its weight; None behind the barrier."""
        firsts = [sequences[-1] for tenant, sequences in self._ready.items() if tenant not in passed]
        barrier = self._demand.barrier()
        if barrier is not None:
            firsts = [first for first in firsts if first.rank < barrier]
        return min(firsts, key=lambda first: (self._shares.with_one_more(first), first.rank), default=None)

    def take(self, sequence: Sequence) -> None:
        """Let the sequence run that head has just returned, and pin its adapter."""
        self._unready(sequence)
        sequence.move_to(SequenceState.RUNNING)
        adapter = sequence.spec.adapter
        if adapter:
            sequence.adapter_slot = self._adapters.slots.pin(adapter.digest)
            self._demand.leave(sequence, adapter.digest)
        self._demand.admitted()

    def _unready(self, sequence: Sequence) -> None:
        sequences = self._ready[sequence.spec.tenant]
        del sequences[bisect_left(sequences, _last_first(sequence), key=_last_first)]
        if not sequences:
            del self._ready[sequence.spec.tenant]
        self._ready_count -= 1

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that waits, because it ends."""
        adapter = sequence.spec.adapter
        if sequence.state is SequenceState.READY:
            self._unready(sequence)
        sequence.move_to(SequenceState.ENDED)
        if adapter:
            self._demand.leave(sequence, adapter.digest)
            if not self._demand.parked(adapter.digest):
                self._adapters.withdraw(adapter.digest)

    def arrived(self, digest: str) -> None:
        """Make all sequences ready that were parked for an adapter, which is now in a slot."""
        for sequence in self._demand.unpark(digest):
            self._make_ready(sequence)

    def parked_for(self, digest: str) -> list[Sequence]:
        """Return the sequences that are parked for this adapter."""
        return self._demand.parked(digest)

    def _make_ready(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceState.READY)
        insort(self._ready.setdefault(sequence.spec.tenant, []), sequence, key=_last_first)
        self._ready_count += 1

    def _park(self, sequence: Sequence) -> None:
        adapter = sequence.spec.adapter
        if adapter is None:
            raise ValueError(f"sequence {sequence.sequence_id} has no adapter to wait for")
        sequence.move_to(SequenceState.PARKED)
        self._demand.park(sequence, adapter.digest)
        self._adapters.request(adapter)


by_rank = attrgetter("rank")


class RunningSequences:
    """Running sequences `in_rank`, which lose their blocks and their adapter's slot when they are preempted.

    The first one is preempted only where it is alone.
    """

    def __init__(
        self, blocks: BlockManager, waiting: WaitingSequences, adapters: AdapterCache[Any], shares: RowShares
    ) -> None:
        self._blocks = blocks
        self._waiting = waiting
        self._adapters = adapters
        self._shares = shares
        self.in_rank: list[Sequence] = []
        # Sequences that had to give their row or their blocks to others, since the start.
        self.preemptions = 0

    def __len__(self) -> int:
        return len(self.in_rank)

    def start(self, sequence: Sequence) -> None:
        """Take the sequence that the waiting list has just let go, with its blocks."""
        sequence.started_at = sequence.answered
        insort(self.in_rank, sequence, key=by_rank)
        self._shares.add(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Free all that a running sequence holds."""
        self.in_rank.remove(sequence)
        self._shares.remove(sequence)
        self._blocks.release_blocks(sequence)
        sequence.stop()
        if sequence.spec.adapter:
            self._adapters.unpin(sequence.spec.adapter.digest)

    def preempt(self, sequence: Sequence) -> None:
        """Let a running sequence wait again; it is computed from the start."""
        self.preemptions += 1
        self.stop(sequence)
        self._waiting.enter(sequence)

    def extend(self, sequence: Sequence) -> bool:
        """Give a sequence one more block, if need be of those after it in rank. False: it was preempted itself.

        The tenant that has most rows for its weight gives its last one.
        """
        while not self._blocks.extend(sequence):
            position = bisect_left(self.in_rank, sequence.rank, key=by_rank)
            last = self._shares.last_of_largest(self.in_rank[max(1, position) :] or [sequence])
            self.preempt(last)
            if last is sequence:
                return False
        return True

    def yield_to(self, sequence: Sequence, rows: int) -> None:
        """Preempt sequences of tenants above their share for one that waits, and lacks so many rows, or blocks.

        Nobody is preempted where that would not be enough.
        """
        candidates = self._shares.candidates(sequence, self.in_rank)
        if candidates:
            for victim in self._shares.victims(sequence, candidates, rows, self._blocks.shortage(sequence)):
                self.preempt(victim)

    def check(self) -> None:
        """Raise an integrity error unless exactly these sequences hold blocks and pins. Takes time O(blocks)."""
        self._blocks.check(self.in_rank)
        self._adapters.check(Counter(running.spec.adapter.digest for running in self.in_rank if running.spec.adapter))


class MemoryCeilings:
    """The maximum number of running sequences, and of tokens in a step's chunks.

    They fall when a step runs out of memory, and rise again as sequences end.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._unlimited_tokens = limits.rows * limits.max_tokens
        self.rows = limits.rows
        self.chunk_tokens = self._unlimited_tokens

    def lower(self, batch: Batch, running: RunningSequences) -> Sequence | None:
        """Make the next batch smaller than this one, for which memory was not enough; return one that was alone.

        Drafts are halved first. Where chunks were most of it, they are halved from now on; else the last sequence in
        rank is preempted, and its place stays empty.
        """
        plain = sum(not row.place for row in batch.rows)
        if plain < len(batch.rows):
            self.rows = max(plain, len(batch.rows) // 2)
            return None
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
