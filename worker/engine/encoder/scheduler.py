"""Decides which texts the next step computes. A text is computed whole, in one step, and has its vector then.

One step of an encoder's engine:

    outputs = scheduler.take_arrivals()             adapters that arrived
    batch = scheduler.schedule()                    texts whose adapters are there, up to step_tokens, but at least one
    if batch:
        outputs += scheduler.commit(batch, vectors of the texts)

Waiting, tenants' shares, priorities and adapters are those of worker.engine.scheduling. There are no KV blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Vectors
from typing import Any

from options import FinishKind
from worker.engine.scheduling.adapter_cache import AdapterCache
from worker.engine.scheduling.admission import RowShares, WaitingSequences
from worker.engine.scheduling.scheduler import Counters
from worker.engine.scheduling.sequence import OUT_OF_MEMORY, Sequence, SequenceState, adapter_failure, output_of
from worker.engine.scheduling.validate import check_sequence
from worker.engine_api import EngineLimits, EngineStats, Failure, NewSequence, Output, SequenceRefusedError

Vector = tuple[float, ...]


class EncoderScheduler:
    """Texts that wait, shared by tenants, and those of the step that runs. One thread.

    A step has at most `rows` texts. `on_begun` is called with a sequence's id before anything is computed of it.
    """

    # Vectors leave no keys and values behind.
    blocks = None

    def __init__(
        self,
        limits: EngineLimits,
        rows: int,
        step_tokens: int,
        adapters: AdapterCache[Any],
        on_begun: Callable[[str], None] = lambda sequence_id: None,
    ) -> None:
        self.limits = limits
        self._rows = rows
        self._step_tokens = step_tokens
        # Falls when a step runs out of memory, and rises again with every step that does not.
        self._ceiling = step_tokens
        self._adapters = adapters
        self._on_begun = on_begun
        self._shares = RowShares()
        self._waiting = WaitingSequences(adapters, self._shares)
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._counters = Counters()
        self._preemptions = 0

    def add_sequence(self, spec: NewSequence) -> None:
        """Take a text, and request its adapter where it is not resident. Raises SequenceRefusedError."""
        check_sequence(spec, self.limits)
        if spec.encode is None:
            raise SequenceRefusedError("encode", "is missing: this model gives vectors, no answers")
        if spec.sequence_id in self._sequences:
            raise SequenceRefusedError("sequence_id", f"{spec.sequence_id} is running already")
        sequence = Sequence(spec, self._counters.sequences_taken, frozenset())
        self._counters.sequences_taken += 1
        self._sequences[spec.sequence_id] = sequence
        self._waiting.enter(sequence)

    def abort(self, sequence_id: str) -> None:
        """Forget a text; unknown ids are ignored."""
        sequence = self._sequences.get(sequence_id)
        if sequence:
            self._end(sequence)

    def has_work(self) -> bool:
        """Tell whether take_arrivals or schedule would do anything now."""
        return self._waiting.any_ready or self._adapters.has_work()

    def take_arrivals(self) -> list[Output]:
        """Let in adapters that are ready; end the texts whose adapter could not be loaded."""
        outputs: list[Output] = []
        arrivals = self._adapters.poll(busy=False)
        for digest in arrivals.arrived:
            self._waiting.arrived(digest)
        for digest, error in arrivals.failed:
            failure = adapter_failure(digest, error)
            outputs += [self._fail(sequence, failure) for sequence in self._waiting.parked_for(digest)]
        return outputs

    def schedule(self) -> list[Sequence]:
        """Return the texts of the next step: first those of one token, then the rest, each sorted by adapter_slot."""
        tokens = 0
        while len(self._running) < self._rows:
            sequence = self._waiting.head(self.limits.rows)
            if sequence is None or (self._running and tokens + len(sequence.ids) > self._ceiling):
                break
            self._waiting.take(sequence)
            if sequence.cached_tokens is None:
                self._on_begun(sequence.sequence_id)
                sequence.cached_tokens = 0
            self._shares.add(sequence)
            self._running.append(sequence)
            tokens += len(sequence.ids)
        return sorted(self._running, key=lambda one: (len(one.ids) > 1, one.adapter_slot))

    def commit(self, batch: Iterable[Sequence], results: Iterable[Vector | Failure]) -> list[Output]:
        """Take what a step has computed, and end its texts."""
        self._counters.steps += 1
        self._ceiling = min(2 * self._ceiling, self._step_tokens)
        outputs = []
        for sequence, result in zip(batch, results, strict=True):
            self._counters.computed_tokens += len(sequence.ids)
            if isinstance(result, Failure):
                outputs.append(self._fail(sequence, result))
                continue
            sequence.vector = result
            self._end(sequence)
            outputs.append(output_of(sequence, (), FinishKind.LENGTH))
        return outputs

    def revoke(self, batch: Vectors[Sequence]) -> list[Output]:
        """Let the texts of a step wait again, for which memory was not enough; one that was alone fails."""
        if len(batch) == 1:
            return [self._fail(batch[0], OUT_OF_MEMORY)]
        self._ceiling = sum(len(sequence.ids) for sequence in batch) // 2
        for sequence in batch:
            self._preemptions += 1
            self._stop(sequence)
            self._waiting.enter(sequence)
        return []

    def stats(self) -> EngineStats:
        """Return what is held now."""
        return EngineStats(
            steps=self._counters.steps,
            rows_running=len(self._running),
            rows_waiting=len(self._waiting),
            blocks_free=self.limits.blocks,
            blocks_cached=0,
            blocks_referenced=0,
            slots_used=self._adapters.slots.used,
            slots_pinned=self._adapters.slots.pinned,
            adapters=self._adapters.slots.digests,
            sequences_taken=self._counters.sequences_taken,
            adapter_hits=self._waiting.hits,
            adapter_misses=self._waiting.misses,
            tiers=self._adapters.tiers,
            preemptions=self._preemptions,
            computed_tokens=self._counters.computed_tokens,
            prefix_queries=0,
            prefix_hits=0,
        )

    def check(self) -> None:
        """Raise an integrity error unless exactly the running texts hold pins."""
        self._adapters.check(Counter(one.spec.adapter.digest for one in self._running if one.spec.adapter))

    def _fail(self, sequence: Sequence, failure: Failure) -> Output:
        self._end(sequence)
        return output_of(sequence, (), FinishKind.FAILED, failure)

    def _stop(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._shares.remove(sequence)
        sequence.stop()
        if sequence.spec.adapter:
            self._adapters.unpin(sequence.spec.adapter.digest)

    def _end(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._stop(sequence)
            sequence.move_to(SequenceState.ENDED)
        else:
            self._waiting.leave(sequence)
        del self._sequences[sequence.sequence_id]
