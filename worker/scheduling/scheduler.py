"""Which sequences the next step computes, and what becomes of its tokens.

One step of an engine:

    outputs = scheduler.poll()                      adapters that arrived; answers that were complete on arrival
    batch = scheduler.schedule()                    decodes first, prefill chunks with what is left of step_tokens
    if batch:
        sampled = run the model on batch.rows       one id for each row with `samples`, in order
        outputs += scheduler.commit(batch, sampled)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from itertools import zip_longest
from operator import attrgetter

from artifacts.errors import ArtifactError, MismatchError
from worker.scheduling.batch import Batch, Row
from worker.scheduling.blocks import BlockIntegrityError, BlockManager
from worker.scheduling.contract import (
    EngineLimits,
    EngineStats,
    Failure,
    FinishKind,
    NewSequence,
    Output,
    SequenceRefusedError,
    TokenLogprobs,
)
from worker.scheduling.residency import Residency
from worker.scheduling.sequence import Sequence
from worker.scheduling.validate import check_sequence
from worker.scheduling.waiting import WaitingSequences

_by_rank = attrgetter("rank")
_by_slot = attrgetter("sequence.adapter_slot")


class Scheduler:
    """Continuous batching: first come first served with priorities, preemption by recomputing. One thread.

    A step's work is O(batch), whatever waits. `step_tokens` bounds the tokens of a step; `limits.rows` at least.
    """

    def __init__(
        self, limits: EngineLimits, end_token_ids: Iterable[int], step_tokens: int, residency: Residency
    ) -> None:
        self.limits = limits
        # A row that prefills leaves at most rows - 1 decodes: with so many tokens it always advances.
        self.step_tokens = max(step_tokens, limits.rows)
        self.blocks = BlockManager(limits.blocks, limits.block_size)
        self._end_ids = frozenset(end_token_ids)
        self._residency = residency
        self._sequences: dict[str, Sequence] = {}
        # In order of rank: the last one is the first to be preempted.
        self._running: list[Sequence] = []
        self._waiting = WaitingSequences(residency)
        self._complete: list[Output] = []
        self._arrivals = 0
        self._steps = 0

    def add(self, spec: NewSequence) -> None:
        """Take a sequence; asks for its adapter where it is not resident. Raises SequenceRefusedError."""
        check_sequence(spec, self.limits)
        if spec.sequence_id in self._sequences:
            raise SequenceRefusedError("sequence_id", f"{spec.sequence_id} is running already")
        sequence = Sequence(spec, self._arrivals, self._end_ids)
        self._arrivals += 1
        finish = sequence.finish()
        if finish:
            self._complete.append(self._output(sequence, (), finish))
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
                outputs.append(self._output(sequence, (), FinishKind.FAILED, failure))
        return outputs

    def has_work(self) -> bool:
        """Whether poll or schedule would do anything now."""
        return bool(self._running or self._complete or self._waiting.any_ready) or self._residency.has_work()

    def poll(self) -> list[Output]:
        """Let in adapters that have been loaded; ends the sequences of those that could not be."""
        outputs, self._complete = self._complete, []
        arrivals = self._residency.poll()
        for digest in arrivals.arrived:
            self._waiting.arrived(digest)
        for digest, error in arrivals.failed:
            ids = [sequence.sequence_id for sequence in self._waiting.parked_for(digest)]
            outputs += self.fail(ids, _adapter_failure(digest, error))
        return outputs

    def schedule(self) -> Batch | None:
        """The rows of the next step, with blocks for all of them; None where no sequence can run."""
        singles: list[Row] = []
        prefilling: list[Sequence] = []
        index = 0
        # From the first in rank on; preemption takes from the end.
        while index < len(self._running):
            sequence = self._running[index]
            index += 1
            computed = sequence.computed
            if len(sequence.ids) - computed > 1:
                prefilling.append(sequence)
            elif computed < len(sequence.block_table) * self.limits.block_size or self._extend(sequence):
                singles.append(Row(sequence, computed, 1, True))
        budget = self.step_tokens - len(singles)
        chunks: list[Row] = []
        for sequence in prefilling:
            if budget:
                budget -= self._plan_chunk(sequence, budget, singles, chunks)
        self._admit(budget, singles, chunks)
        if not singles and not chunks:
            return None
        singles.sort(key=_by_slot)
        chunks.sort(key=_by_slot)
        tokens = len(singles) + sum(row.count for row in chunks)
        return Batch((*singles, *chunks), len(singles), tokens)

    def commit(self, batch: Batch, sampled: Ids[int], logprobs: Iterable[TokenLogprobs | None] = ()) -> list[Output]:
        """Take what a step has computed: one id for each row with `samples`, in order. Rows that ended are skipped.

        `logprobs` are of the same rows; they may be left out where nobody asks for them.
        """
        self._steps += 1
        block_size = self.limits.block_size
        outputs = []
        ids = zip_longest(sampled, logprobs)
        for row in batch.rows:
            sequence = row.sequence
            token, logprob = next(ids) if row.samples else (None, None)
            if not sequence.running:
                continue
            computed = sequence.computed = row.start + row.count
            if computed // block_size > sequence.registered:
                self.blocks.register(sequence)
            if token is None:
                continue
            sequence.ids.append(token)
            sequence.answered += 1
            finish = sequence.finish()
            if finish:
                self._end(sequence)
            outputs.append(self._output(sequence, (token,), finish, logprobs=(logprob,) if logprob else ()))
        return outputs

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
        )

    def check(self) -> None:
        """Raise BlockIntegrityError unless exactly the running sequences hold blocks. Takes time O(blocks)."""
        self.blocks.check(self._running)

    def _plan_chunk(self, sequence: Sequence, budget: int, singles: list[Row], chunks: list[Row]) -> int:
        left = len(sequence.ids) - sequence.computed
        count = min(left, budget)
        row = Row(sequence, sequence.computed, count, count == left)
        (singles if count == 1 else chunks).append(row)
        return count

    def _admit(self, budget: int, singles: list[Row], chunks: list[Row]) -> None:
        tries = self.limits.rows
        while budget and len(self._running) < self.limits.rows:
            sequence = self._waiting.head(tries)
            # Nobody overtakes one that waits for blocks, or a long prompt might wait for ever.
            if sequence is None or not self.blocks.allocate(sequence):
                return
            self._waiting.take_head()
            sequence.running = True
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
            insort(self._running, sequence, key=_by_rank)
            budget -= self._plan_chunk(sequence, budget, singles, chunks)

    def _extend(self, sequence: Sequence) -> bool:
        """One more block for a running sequence, if need be from those after it in rank; else it is preempted."""
        while not self.blocks.extend(sequence):
            last = self._running[-1]
            self._stop_running(last)
            self._waiting.enter(last)
            if last is sequence:
                return False
        return True

    def _stop_running(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.blocks.release(sequence)
        sequence.running = False
        sequence.adapter_slot = -1
        if sequence.spec.adapter:
            self._residency.unpin(sequence.spec.adapter.digest)

    def _end(self, sequence: Sequence) -> None:
        if sequence.running:
            self._stop_running(sequence)
        else:
            self._waiting.leave(sequence)
        del self._sequences[sequence.sequence_id]
        if not self._sequences and self.blocks.referenced:
            raise BlockIntegrityError(f"{self.blocks.referenced} blocks are referenced by no sequence")

    def _output(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        finish: FinishKind | None,
        failure: Failure | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> Output:
        first = not sequence.reported
        sequence.reported = True
        return Output(
            sequence.sequence_id,
            sequence.answered - len(token_ids),
            token_ids,
            finish,
            failure,
            adapter_ms=sequence.adapter_ms if first else None,
            cached_tokens=(sequence.cached_tokens or 0) if first else None,
            logprobs=logprobs,
            # Of a sequence that ends before its first token they are incomplete.
            prompt_logprobs=tuple(sequence.prompt_logprobs) if first and token_ids else (),
        )


def _adapter_failure(digest: str, error: Exception) -> Failure:
    code = "INTERNAL"
    if isinstance(error, MismatchError):
        code = "FAILED_PRECONDITION"
    elif isinstance(error, ArtifactError):
        code = "INVALID_ARGUMENT"
    return Failure(code, "ADAPTER_UNLOADABLE", f"adapter {digest}: {error}", field="adapter")
