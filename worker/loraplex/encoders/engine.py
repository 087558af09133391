"""An engine over an encoder, and its scheduler; usable alone, in a script or a notebook.

engine = build_encoder(EngineConfig("path/to/encoder"))
engine.add_sequence(NewSequence("a", (101, 7592, 102), stopping=Stopping(max_tokens=0), encode=Encode("embed")))
while engine.has_work(): print(engine.step())
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from loraplex.contracts.options import FinishReason
from loraplex.encoders.body import EncoderBody
from loraplex.encoders.loader import ClassifierHeads, LoadedEncoder, load_encoder
from loraplex.worker.engine.device import is_out_of_memory, step_threads
from loraplex.worker.engine.engine import Engine
from loraplex.worker.engine.linear.layouts import laid_out, replace_linears
from loraplex.worker.engine.lora.base_layers import ModelLayers
from loraplex.worker.engine.lora.cpu import CpuLayers
from loraplex.worker.engine.lora.weights import AdapterWeights, PackedAdapter, adapter_cache
from loraplex.worker.engine.model.encoding import NO_CLASSIFIER, pooled, to_vector
from loraplex.worker.engine.scheduling.adapter_cache import AdapterCache
from loraplex.worker.engine.scheduling.scheduler import SequenceScheduler
from loraplex.worker.engine.scheduling.sequence import OUT_OF_MEMORY, output_of
from loraplex.worker.engine.scheduling.sequence import Sequence as Text
from loraplex.worker.engine_api import (
    EngineConfig,
    EngineLimits,
    Failure,
    NewSequence,
    Output,
    SequenceRefusedError,
)

Vector = tuple[float, ...]


class EncoderScheduler(SequenceScheduler):
    """Decides which texts the next step computes. A text is computed whole, in one step, and has its vector then.

    Waiting, tenants' rows, priorities and adapters are those of worker.engine.scheduling. There are no KV blocks. A
    step has at most `rows` texts, and `step_tokens` of them beyond the first. One thread.
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

    def schedule(self) -> list[Text]:
        """Return the texts of the next step: first those of one token, then the rest, each sorted by adapter_slot."""
        tokens = 0
        while len(self._running) < self._rows:
            sequence = self._waiting.head(self.limits.rows)
            if sequence is None or (self._running and tokens + len(sequence.ids) > self._ceiling):
                break
            self._begin(sequence)
            self._running.start(sequence)
            tokens += len(sequence.ids)
        return sorted(self._running.in_rank, key=lambda one: (len(one.ids) > 1, one.adapter_slot))

    def commit(self, batch: Iterable[Text], results: Iterable[Vector | Failure]) -> list[Output]:
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

    def revoke(self, batch: Sequence[Text]) -> list[Output]:
        """Let the texts of a step wait again, for which memory was not enough; one that was alone fails."""
        if len(batch) == 1:
            return self.fail([batch[0].sequence_id], OUT_OF_MEMORY)
        self._ceiling = sum(len(sequence.ids) for sequence in batch) // 2
        for sequence in batch:
            self._running.preempt(sequence)
        return []


class EncoderRunner:
    """An encoder, its head, and its adapters' slots; from one thread."""

    def __init__(self, loaded: LoadedEncoder, slots: int, max_rank: int, on_layer: Callable[[], None]) -> None:
        """Replace the model's layers by adaptable ones."""
        self._own_pooling = loaded.pooling
        self._body = EncoderBody(loaded, slots, on_layer)
        self._heads = ClassifierHeads(loaded, slots)
        replace_linears(loaded.module, lambda linear: laid_out(linear, loaded.dtype) or linear)
        self._lora = CpuLayers(loaded.module, loaded.of_tokens, slots, max_rank, loaded.dtype, loaded.ends)
        self._warm_up()

    @property
    def classifies(self) -> bool:
        """Tell whether texts without an adapter can be classified."""
        return self._heads.complete(-1)

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """Replace a slot's adapter."""
        self._lora.install(weights, slot)
        self._body.install(weights, slot)
        self._heads.install(weights, slot)

    @torch.inference_mode()
    def run(self, batch: Sequence[Text]) -> list[tuple[float, ...] | Failure]:
        """Return the vector or the failure of each text. Raises an error for lack of memory."""
        classified = [text for text in batch if _task(text) == "classify" and self._heads.complete(text.adapter_slot)]
        chosen = set(classified)
        counts = [len(text.ids) for text in batch]
        slots = [text.adapter_slot for text in batch]
        self._lora.begin_step(list(zip(slots, counts, strict=True)), [int(text in chosen) for text in batch])
        hidden = self._body.hidden_states(
            [text.ids for text in batch],
            [text.spec.encode.pair_tokens if text.spec.encode else 0 for text in batch],
            slots,
        )
        of_text = dict(zip(batch, hidden.split_with_sizes(counts), strict=True))
        results: dict[Text, Tensor] = {}
        if classified:
            for_head = torch.stack([pooled(of_text[text], self._heads.pooling) for text in classified])
            logits = self._heads.logits(for_head, [text.adapter_slot for text in classified])
            results.update(zip(classified, logits, strict=True))
        for text in batch:
            if _task(text) == "embed":
                results[text] = pooled(of_text[text].float(), self._pooling(text))
        return [to_vector(results[text]) if text in results else NO_CLASSIFIER for text in batch]

    def _pooling(self, text: Text) -> str:
        return (text.spec.encode.pooling if text.spec.encode else "") or self._own_pooling

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Run one warm-up pass, which triggers compilation."""
        self._lora.begin_step([(-1, 1)], [0])
        self._body.hidden_states([[0]], [0], [-1])


def _task(text: Text) -> str:
    return text.spec.encode.task if text.spec.encode else ""


_log = logging.getLogger(__name__)


class EncoderEngine(Engine[EncoderScheduler]):
    """An encoder as an Engine: texts of any length and adapter in one batch."""

    def __init__(
        self, scheduler: EncoderScheduler, runner: EncoderRunner, adapters: AdapterCache[PackedAdapter]
    ) -> None:
        super().__init__(scheduler, adapters)
        self._runner = runner

    def add_sequence(self, sequence: NewSequence) -> None:
        """See Engine."""
        encode = sequence.encode
        if encode and encode.task == "classify" and sequence.adapter is None and not self._runner.classifies:
            raise SequenceRefusedError("adapter", NO_CLASSIFIER.message)
        super().add_sequence(sequence)

    def step(self) -> list[Output]:
        """Compute one batch of texts."""
        outputs = self._scheduler.take_arrivals()
        batch = self._scheduler.schedule()
        if not batch:
            return outputs
        try:
            results = self._runner.run(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("memory is not enough for a step of %d texts", len(batch))
        else:
            return outputs + self._scheduler.commit(batch, results)
        # Only here, because the exception holds the frames of the failed step, and with them its tensors.
        return outputs + self._scheduler.revoke(batch)


# Interval in seconds of the signs of life within a step: a text can't be cut, and a long one takes seconds.
_SIGN_S = 0.2


def build_encoder(
    config: EngineConfig,
    *,
    on_loaded: Callable[[], None] = lambda: None,
    on_begun: Callable[[str], None] = lambda sequence_id: None,
    on_progress: Callable[[], None] = lambda: None,
) -> EncoderEngine:
    """Load an encoder's directory and build an engine around it.

    `on_loaded` is called from another thread when an adapter has been read; `on_begun` before the first step of a text;
    `on_progress` now and then within a step. Raises ModelUnusableError.
    """
    loaded = load_encoder(config.model, config.device, config.dtype, config.quantize)
    base = ModelLayers(loaded)
    signs = _SignsOfLife(_SIGN_S, on_progress)
    runner = EncoderRunner(loaded, config.adapter_slots, config.max_rank, signs)
    adapters = adapter_cache(base, config, on_loaded, runner.install)
    torch.set_num_threads(step_threads(loaded.parameters, config.threads))
    # Rows of two steps: the texts of the next one wait while one runs, so that no step waits for a claim.
    two_steps = replace(config, rows=2 * config.rows)
    # Texts keep nothing from step to step: so many blocks, always free, hold whatever comes.
    blocks = two_steps.rows * -(-loaded.context_length // config.block_size)
    limits = EngineLimits.of(two_steps, blocks=blocks, context=loaded.context_length, vocab_size=loaded.vocab_size)
    scheduler = EncoderScheduler(limits, config.rows, config.step_tokens, adapters, on_begun)
    engine = EncoderEngine(scheduler, runner, adapters)
    signs.begin()
    return engine


class _SignsOfLife:
    """Calls `action` where it was not called for so long; not before the engine is there."""

    def __init__(self, interval_s: float, action: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._action = action
        self._called_at = math.inf

    def begin(self) -> None:
        """Call `action` from now on."""
        self._called_at = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._called_at >= self._interval_s:
            self._called_at = now
            self._action()
