"""Computes the vectors of a step's texts: hidden states, then pooled or classified."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worker.engine.encoder.body import EncoderBody
from worker.engine.encoder.heads import ClassifierHeads
from worker.engine.encoder.loader import LoadedEncoder
from worker.engine.linear.choice import unmeasured
from worker.engine.linear.layouts import replace_linears
from worker.engine.lora.cpu.layers import CpuLayers
from worker.engine.lora.weights import AdapterWeights
from worker.engine.model.encoding import NO_CLASSIFIER, pooled, to_vector
from worker.engine.scheduling.sequence import Sequence as Text
from worker.engine_api import Failure


class EncoderRunner:
    """An encoder, its head, and its adapters' slots; from one thread."""

    def __init__(self, loaded: LoadedEncoder, slots: int, max_rank: int, on_layer: Callable[[], None]) -> None:
        """Replace the model's layers by adaptable ones."""
        self._own_pooling = loaded.pooling
        self._body = EncoderBody(loaded, slots, on_layer)
        self._heads = ClassifierHeads(loaded, slots)
        replace_linears(loaded.module, unmeasured(loaded.module, loaded.dtype).make)
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
