"""Vectors that sequences ask a decoder for: pooled hidden states of the last layer, or the logits of an adapter's head.

    prompt     │ chunk, step 1 │ chunk, step 2 │ last chunk, step 3 │
    mean       sum ──────────▶ sum ──────────▶ sum / tokens = vector          last     hidden state of the last token

The hidden states are those that the model's output head gets; no logits are computed for them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from loraplex.worker.engine.device import download
from loraplex.worker.engine.lora.weights import AdapterWeights
from loraplex.worker.engine.model.loader import LoadedModel
from loraplex.worker.engine.sampling.step import PendingVector
from loraplex.worker.engine.scheduling.batch import Batch, Row
from loraplex.worker.engine_api import Failure, NewSequence, SequenceRefusedError

_HEAD = "score.weight"
_NOT_FINITE = Failure("INTERNAL", "NAN_LOGITS", "the model, with this adapter, gave numbers that are not finite")
NO_CLASSIFIER = Failure(
    "FAILED_PRECONDITION",
    "NO_CLASSIFIER",
    "neither the base model nor the adapter has a classifier; train the adapter with task_type SEQ_CLS",
    field="adapter",
)


def pooled(hidden: Tensor, pooling: str) -> Tensor:
    """Return [width] of a text's hidden states [tokens, width]; pooling is "cls", "mean" or "last"."""
    if pooling == "mean":
        return hidden.mean(0)
    return hidden[0] if pooling == "cls" else hidden[-1]


def to_vector(numbers: Tensor) -> tuple[float, ...] | Failure:
    """Return the numbers of a tensor on the host; a failure where one is not finite."""
    vector = tuple(numbers.tolist())
    return vector if all(map(math.isfinite, vector)) else _NOT_FINITE


class Encoding:
    """The rows of a model's steps that ask for vectors. One thread."""

    def __init__(self, loaded: LoadedModel, slots: int) -> None:
        """Watch the model's last hidden states."""
        self._own_pooling = loaded.pooling
        self._heads: list[Tensor | None] = [None] * slots
        self._hidden: Tensor | None = None
        body = loaded.module.base_model
        # OPT's output head gets the decoder's hidden states past the model around it.
        self._watched = [each for each in (body, getattr(body, "decoder", None)) if isinstance(each, nn.Module)]
        # While a step's hidden states are kept.
        self._hooks: list[RemovableHandle] = []

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """Replace a slot's adapter."""
        head = weights.own.get(_HEAD)
        # On the device the head is a part of a buffer that is freed when the adapter is in its slot.
        self._heads[slot] = head.clone() if head is not None and head.is_cuda else head

    def prepare(self, sequence: NewSequence) -> NewSequence:
        """Return a sequence with the pooling that it gets. Raises SequenceRefusedError."""
        encode = sequence.encode
        if encode is None:
            return sequence
        if encode.task == "classify":
            if sequence.adapter is None:
                raise SequenceRefusedError("adapter", NO_CLASSIFIER.message)
            return replace(sequence, encode=replace(encode, pooling="last"))
        pooling = encode.pooling or self._own_pooling
        if pooling == "cls":
            raise SequenceRefusedError("encode.pooling", "the first token of a decoder sees no other; use last or mean")
        return replace(sequence, encode=replace(encode, pooling="mean" if pooling == "mean" else "last"))

    def begin(self, batch: Batch) -> None:
        """Keep the hidden states of the next forward pass if a row of its batch asks for them."""
        self._stop()  # after a step that failed
        if any(row.sequence.spec.encode for row in batch.rows):
            self._hooks = [module.register_forward_hook(self._keep) for module in self._watched]

    def _stop(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def launch(self, batch: Batch) -> list[tuple[Row, PendingVector]]:
        """Pool the hidden states of the batch that has just been computed; the rows whose vectors are complete."""
        if not self._hooks:
            return []
        self._stop()
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "the model's layers were computed"
        pending = []
        parts = hidden.split_with_sizes([row.count for row in batch.rows])
        for row, states in zip(batch.rows, parts, strict=True):
            encode = row.sequence.spec.encode
            if encode is None:
                continue
            if encode.pooling == "mean":
                vector: Tensor | None = self._mean(row, states)
            else:
                vector = self._of_last(row, states[-1]) if row.samples else None
            if row.samples:
                pending.append((row, _read(vector)))
        return pending

    def _mean(self, row: Row, states: Tensor) -> Tensor:
        """Add a chunk's hidden states to those before it: the mean of all, which counts once they are there."""
        # Sums by the position behind them: a step that could not be run is computed again, from its rows' start.
        before = row.sequence.engine_state[row.start] if row.start else 0
        end = row.start + row.count
        total: Tensor = states.float().sum(0) + before
        row.sequence.engine_state = {row.start: before, end: total}
        return total / end

    def _of_last(self, row: Row, state: Tensor) -> Tensor | None:
        """Return the last token's hidden state, or its logits; None without a head."""
        if row.sequence.spec.encode and row.sequence.spec.encode.task == "embed":
            return state
        slot = row.sequence.adapter_slot
        head = self._heads[slot] if slot >= 0 else None
        return None if head is None else linear(state, head)

    def _keep(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state[0]


def _read(vector: Tensor | None) -> PendingVector:
    if vector is None:
        return lambda: NO_CLASSIFIER
    host = download(vector.float())
    return lambda: to_vector(host)
