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

from options import FinishReason
from worker.engine.scheduling.adapter_cache import AdapterCache
from worker.engine.scheduling.scheduler import SequenceScheduler
from worker.engine.scheduling.sequence import OUT_OF_MEMORY, Sequence, SequenceState, output_of
from worker.engine_api import EngineLimits, EngineStats, Failure, NewSequence, Output, SequenceRefusedError

Vector = tuple[float, ...]


class EncoderScheduler(SequenceScheduler):
    """Texts that wait, shared by tenants, and those of the step that runs. One thread.

    A step has at most `rows` texts. Vectors leave no keys and values behind.
    """

    def __init__(
        self,
        limits: EngineLimits,
        rows: int,
        step_tokens: int,
        adapters: AdapterCache[Any],
        on_begun: Callable[[str], None] = lambda sequence_id: None,
    ) -> None:
        super().__init__(limits, adapters, on_begun)
        self._rows = rows
        self._step_tokens = step_tokens
        # Falls when a step runs out of memory, and rises again with every step that does not.
        self._ceiling = step_tokens
        self._running: list[Sequence] = []
        self._preemptions = 0

    def add_sequence(self, spec: NewSequence) -> None:
        """See SequenceScheduler."""
        if spec.encode is None:
            raise SequenceRefusedError("encode", "is missing: this model gives vectors, no answers")
        sequence = self._new_sequence(spec, frozenset())
        self._sequences[spec.sequence_id] = sequence
        self._waiting.enter(sequence)

    def has_work(self) -> bool:
        """See SequenceScheduler."""
        return self._waiting.ready > 0 or self._adapters.has_work()

    def take_arrivals(self) -> list[Output]:
        """Let in adapters that are ready; end the texts whose adapter could not be loaded."""
        return self._take_adapters(busy=False)

    def schedule(self) -> list[Sequence]:
        """Return the texts of the next step: first those of one token, then the rest, each sorted by adapter_slot."""
        tokens = 0
        while len(self._running) < self._rows:
            sequence = self._waiting.head(self.limits.rows)
            if sequence is None or (self._running and tokens + len(sequence.ids) > self._ceiling):
                break
            self._begin(sequence)
            self._shares.add(sequence)
            self._running.append(sequence)
            tokens += len(sequence.ids)
        return sorted(self._running, key=lambda one: (len(one.ids) > 1, one.adapter_slot))

    def commit(self, batch: Iterable[Sequence], results: Iterable[Vector | Failure]) -> list[Output]:
        """Take what a step has computed, and end its texts."""
        self._steps += 1
        self._ceiling = min(2 * self._ceiling, self._step_tokens)
        outputs = []
        for sequence, result in zip(batch, results, strict=True):
            self._computed_tokens += len(sequence.ids)
            if isinstance(result, Failure):
                outputs += self.fail([sequence.sequence_id], result)
                continue
            sequence.vector = result
            self._end(sequence)
            outputs.append(output_of(sequence, (), FinishReason.LENGTH))
        return outputs

    def revoke(self, batch: Vectors[Sequence]) -> list[Output]:
        """Let the texts of a step wait again, for which memory was not enough; one that was alone fails."""
        if len(batch) == 1:
            return self.fail([batch[0].sequence_id], OUT_OF_MEMORY)
        self._ceiling = sum(len(sequence.ids) for sequence in batch) // 2
        for sequence in batch:
            self._preemptions += 1
            self._stop(sequence)
            self._waiting.enter(sequence)
        return []

    def stats(self) -> EngineStats:
        """See SequenceScheduler."""
        return self._stats(len(self._running), self._preemptions)

    def check(self) -> None:
        """See SequenceScheduler."""
        self._adapters.check(Counter(one.spec.adapter.digest for one in self._running if one.spec.adapter))

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
