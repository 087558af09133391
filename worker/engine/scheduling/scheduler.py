"""Which sequences the next step computes, and what becomes of its tokens.

One step of an engine:

    outputs = scheduler.poll()                      adapters that arrived; answers that were complete on arrival
    batch = scheduler.schedule()                    decodes first, prefill chunks with what is left of step_tokens
    if batch:
        sampled = run the model on batch.rows       one id for each row with `samples`, in order
        outputs += scheduler.commit(batch, sampled)

One that steps ahead schedules the next batch before it commits this one, whose ids are placeholders meanwhile (see
sequence.py). Batches are committed in the order in which they were scheduled; one that could not be run is revoked.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Ids
from itertools import zip_longest
from operator import attrgetter

from worker.engine.scheduling.batch import Batch, Row
from worker.engine.scheduling.blocks import BlockIntegrityError, BlockManager
from worker.engine.scheduling.chunk_sizer import ChunkBudget, ChunkSizer
from worker.engine.scheduling.outputs import OUT_OF_MEMORY, adapter_failure, output_of
from worker.engine.scheduling.residency import Residency
from worker.engine.scheduling.sequence import Sequence
from worker.engine.scheduling.validate import check_sequence
from worker.engine.scheduling.waiting import WaitingSequences
from worker.engine_api import (
    EngineLimits,
    EngineStats,
    Failure,
    FinishKind,
    NewSequence,
    Output,
    SequenceRefusedError,
    TokenLogprobs,
)

_by_rank = attrgetter("rank")
_by_slot = attrgetter("sequence.adapter_slot")


class Scheduler:
    """Continuous batching: first come first served with priorities, preemption by recomputing. One thread.

    A step's work is O(batch), whatever waits. `step_tokens` bounds the tokens of a step; `limits.rows` at least. With a
    chunk sizer its chunks get what that allows of them. `on_begun` is called with a sequence's id before anything is
    computed of it.
    """

    def __init__(
        self,
        limits: EngineLimits,
        end_token_ids: Iterable[int],
        step_tokens: int,
        residency: Residency,
        chunk_sizer: ChunkSizer | None = None,
        on_begun: Callable[[str], None] = lambda sequence_id: None,
    ) -> None:
        self.limits = limits
        # A row that prefills leaves at most rows - 1 decodes: with so many tokens it always advances.
        self.step_tokens = max(step_tokens, limits.rows)
        self.blocks = BlockManager(limits.blocks, limits.block_size)
        self._end_ids = frozenset(end_token_ids)
        self._residency = residency
        self._chunk_sizer = chunk_sizer
        self._on_begun = on_begun
        self._sequences: dict[str, Sequence] = {}
        # In order of rank: the last one is the first to be preempted.
        self._running: list[Sequence] = []
        # How many run, and how many tokens of chunks a step takes: less after a step for which memory was not enough.
        self._most_running = limits.rows
        self._most_chunk_tokens = limits.rows * limits.max_tokens
        self._waiting = WaitingSequences(residency)
        self._complete: list[Output] = []
        self._arrivals = 0
        self._steps = 0
        self._preemptions = self._computed_tokens = self._prefix_queries = self._prefix_hits = 0

    def add(self, spec: NewSequence) -> None:
        """Take a sequence; asks for its adapter where it is not resident. Raises SequenceRefusedError."""
        check_sequence(spec, self.limits)
        if spec.sequence_id in self._sequences:
            raise SequenceRefusedError("sequence_id", f"{spec.sequence_id} is running already")
        sequence = Sequence(spec, self._arrivals, self._end_ids)
        self._arrivals += 1
        finish = sequence.finish()
        if finish:
            self._complete.append(output_of(sequence, (), finish))
            return
        self._sequences[spec.sequence_id] = sequence
        self._waiting.enter(sequence)

    def abort(self, sequence_id: str) -> None:
        """Forget a sequence and free all it holds; unknown ids are ignored."""
        sequence = self._sequences.get(sequence_id)
        if sequence:
            self._end(sequence)

    def fail(self, sequence_ids: Iterable[str], failure: Failure) -> list[Output]:
        """End these sequences with a failure; unknown ids are ignored."""
        outputs = []
        for sequence_id in sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence:
                self._end(sequence)
                outputs.append(output_of(sequence, (), FinishKind.FAILED, failure))
        return outputs

    def has_work(self) -> bool:
        """Whether poll or schedule would do anything now."""
        return bool(self._running or self._complete or self._waiting.any_ready) or self._residency.has_work()

    def poll(self) -> list[Output]:
        """Let in adapters that have been loaded; ends the sequences of those that could not be."""
        outputs, self._complete = self._complete, []
        arrivals = self._residency.poll(busy=bool(self._running))
        for digest in arrivals.arrived:
            self._waiting.arrived(digest)
        for digest, error in arrivals.failed:
            ids = [sequence.sequence_id for sequence in self._waiting.parked_for(digest)]
            outputs += self.fail(ids, adapter_failure(digest, error))
        return outputs

    def schedule(self) -> Batch | None:
        """The rows of the next step, with blocks for all of them; None where no sequence can run."""
        singles: list[Row] = []
        prefilling: list[Sequence] = []
        decodes: list[int] = []
        index = 0
        # From the first in rank on; preemption takes from the end.
        while index < len(self._running):
            sequence = self._running[index]
            index += 1
            computed = sequence.computed
            if sequence.waits_for_ids:
                decodes.append(computed)
                continue
            if sequence.length - computed > 1:
                prefilling.append(sequence)
            elif computed < len(sequence.block_table) * self.limits.block_size or self._extend(sequence):
                singles.append(_row(sequence, 1))
                decodes.append(computed)
        budget = self._chunk_budget(decodes, len(singles), len(prefilling))
        chunks: list[Row] = []
        for sequence in prefilling:
            if budget.any:
                _plan_chunk(sequence, budget, singles, chunks)
        self._admit(budget, singles, chunks)
        if not singles and not chunks:
            return None
        singles.sort(key=_by_slot)
        chunks.sort(key=_by_slot)
        tokens = len(singles) + sum(row.count for row in chunks)
        return Batch((*singles, *chunks), len(singles), tokens)

    def commit(
        self,
        batch: Batch,
        sampled: Ids[int],
        logprobs: Iterable[TokenLogprobs | None] = (),
        failures: Mapping[Row, Failure] | None = None,
    ) -> list[Output]:
        """Take what a step has computed: one id for each row with `samples`, in order.

        `logprobs` are of the same rows; they may be left out where nobody asks for them. The sequences of `failures`
        end. Rows of sequences that were stopped since are skipped.
        """
        self._steps += 1
        self._computed_tokens += batch.tokens
        block_size = self.limits.block_size
        outputs = []
        ids = zip_longest(sampled, logprobs)
        for row in batch.rows:
            sequence = row.sequence
            token, logprob = next(ids) if row.samples else (None, None)
            if not row.live:
                continue
            if failures and row in failures:
                outputs += self.fail([sequence.sequence_id], failures[row])
                continue
            computed = row.start + row.count
            if computed // block_size > sequence.registered:
                self.blocks.register(sequence, computed)
            if token is None:
                continue
            sequence.placeholders -= 1
            sequence.ids.append(token)
            sequence.answered += 1
            finish = sequence.finish()
            if finish:
                self._end(sequence)
            outputs.append(output_of(sequence, (token,), finish, logprobs=(logprob,) if logprob else ()))
        return outputs

    def revoke(self, batch: Batch) -> list[Output]:
        """Undo the scheduling of the last batch, for which memory was not enough: the next one is smaller.

        Where chunks were most of it, they are halved from now on; else the last in rank is preempted, and its place is
        not taken; one that was alone fails. Every sequence that ends lifts these ceilings again, step by step.
        """
        for row in batch.rows:
            row.sequence.computed = row.start
            row.sequence.placeholders -= row.samples
        chunk_tokens = batch.tokens - batch.decodes
        if chunk_tokens > batch.decodes:
            self._most_chunk_tokens = chunk_tokens // 2
            return []
        last = max((row.sequence for row in batch.rows), key=_by_rank)
        if len(batch.rows) == 1:
            return self.fail([last.sequence_id], OUT_OF_MEMORY)
        self._preempt(last)
        self._most_running = len(self._running)
        return []

    def stats(self) -> EngineStats:
        """What is held now."""
        return EngineStats(
            steps=self._steps,
            rows_running=len(self._running),
            rows_waiting=len(self._waiting),
            blocks_free=self.blocks.free,
            blocks_cached=self.blocks.cached,
            blocks_referenced=self.blocks.referenced,
            slots_used=self._residency.used,
            slots_pinned=self._residency.pinned,
            adapters=self._residency.resident,
            sequences_taken=self._arrivals,
            adapter_hits=self._waiting.hits,
            adapter_misses=self._waiting.misses,
            tiers=self._residency.tiers,
            preemptions=self._preemptions,
            computed_tokens=self._computed_tokens,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
        )

    def check(self) -> None:
        """Raise BlockIntegrityError unless exactly the running sequences hold blocks. Takes time O(blocks)."""
        self.blocks.check(self._running)

    def _chunk_budget(self, decodes: list[int], singles: int, prefilling: int) -> ChunkBudget:
        tokens = min(self.step_tokens - singles, self._most_chunk_tokens)
        if self._chunk_sizer is None:
            return ChunkBudget(tokens)
        admissible = min(self._waiting.ready, self._most_running - len(self._running))
        return self._chunk_sizer.budget(tokens, decodes, prefilling + max(0, admissible))

    def _admit(self, budget: ChunkBudget, singles: list[Row], chunks: list[Row]) -> None:
        tries = self.limits.rows
        while budget.any and len(self._running) < self._most_running:
            sequence = self._waiting.head(tries)
            if sequence is None:
                return
            if not sequence.begun:
                sequence.begun = True
                self._on_begun(sequence.sequence_id)
            # Nobody overtakes one that waits for blocks, or a long prompt might wait for ever.
            if not self.blocks.allocate(sequence):
                return
            self._waiting.take_head()
            sequence.running = True
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
                self._prefix_queries += len(sequence.ids)
                self._prefix_hits += sequence.computed
            insort(self._running, sequence, key=_by_rank)
            _plan_chunk(sequence, budget, singles, chunks)

    def _extend(self, sequence: Sequence) -> bool:
        """One more block for a running sequence, if need be from those after it in rank; else it is preempted."""
        while not self.blocks.extend(sequence):
            last = self._running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._preemptions += 1
        self._stop_running(sequence)
        self._waiting.enter(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.blocks.release(sequence)
        sequence.running = False
        sequence.placeholders = 0
        sequence.epoch += 1
        sequence.adapter_slot = -1
        if sequence.spec.adapter:
            self._residency.unpin(sequence.spec.adapter.digest)

    def _end(self, sequence: Sequence) -> None:
        if sequence.running:
            self._stop_running(sequence)
            self._most_running = min(self._most_running + 1, self.limits.rows)
            self._most_chunk_tokens = min(2 * self._most_chunk_tokens, self.limits.rows * self.limits.max_tokens)
        else:
            self._waiting.leave(sequence)
        del self._sequences[sequence.sequence_id]
        if not self._sequences and self.blocks.referenced:
            raise BlockIntegrityError(f"{self.blocks.referenced} blocks are referenced by no sequence")


def _plan_chunk(sequence: Sequence, budget: ChunkBudget, singles: list[Row], chunks: list[Row]) -> None:
    begins = sequence.computed == (sequence.cached_tokens or 0)
    count = budget.take(sequence.computed, sequence.length - sequence.computed, begins=begins)
    if count:
        (singles if count == 1 else chunks).append(_row(sequence, count))


def _row(sequence: Sequence, count: int) -> Row:
    """The sequence's next `count` ids, from now on computed, and a placeholder where the next one is sampled."""
    start = sequence.computed
    sequence.computed = start + count
    samples = sequence.computed == sequence.length
    sequence.placeholders += samples
    return Row(sequence, start, count, samples, sequence.epoch)
