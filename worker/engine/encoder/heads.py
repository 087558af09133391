"""Classification: pooled hidden states to logits, by the base's head or by one that an adapter brings.

logits = output(norm(act(dense(pooled))))        one row for each text; the base's layers take LoRA too
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear
from transformers.activations import ACT2FN

from worker.engine.encoder.loader import LoadedEncoder
from worker.engine.lora.weights import AdapterWeights


class ClassifierHeads:
    """The head of the base model, where it has one, and those of the adapters in the slots."""

    def __init__(self, loaded: LoadedEncoder, slots: int) -> None:
        self._module = loaded.module
        self._head = loaded.family.head
        self._own: list[dict[str, Tensor]] = [{} for _ in range(slots)]
        self._of_base = {name for name in self._head.linears if name in loaded.ends}
        config = loaded.module.config
        activations = {
            "bert": "tanh",
            "roberta": "tanh",
            "deberta": getattr(config, "pooler_hidden_act", ""),
            "model": getattr(config, "classifier_activation", ""),
        }
        self._activation: Callable[[Tensor], Tensor] = ACT2FN[activations[loaded.family.prefix]]
        # Pooling of the hidden states that the head gets; only ModernBERT's config names one.
        self.pooling: str = getattr(config, "classifier_pooling", "cls")

    def complete(self, slot: int) -> bool:
        """Tell whether texts with the adapter in a slot can be classified; -1: no adapter."""
        own = self._own_of(slot)
        return all(name in self._of_base or f"{name}.weight" in own for name in self._head.linears)

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """Replace a slot's adapter."""
        self._own[slot] = dict(weights.head)

    def logits(self, pooled: Tensor, slots: Sequence[int]) -> list[Tensor]:
        """Return each row's logits [labels], of pooled [rows, width]; the rows' adapters are complete."""
        rows: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            rows.setdefault(slot, []).append(row)
        hidden = self._activation(torch.stack(self._linear(self._head.dense, pooled, rows)))
        if self._head.norm:
            hidden = self._normed(hidden, rows)
        return self._linear(self._head.output, hidden, rows)

    def _linear(self, name: str, x: Tensor, rows: Mapping[int, list[int]]) -> list[Tensor]:
        """Return each row's output of one layer: the base's, or the one that the row's adapter brings."""
        # The base's is called with all rows, because its adapters' rows are those of the step.
        out = list(self._module.get_submodule(name)(x)) if name in self._of_base else [x[0]] * len(x)
        for slot, its in rows.items():
            own = self._own_of(slot)
            if f"{name}.weight" in own:
                y = linear(x[its], own[f"{name}.weight"], own.get(f"{name}.bias"))
                for row, value in zip(its, y, strict=True):
                    out[row] = value
        return out

    def _normed(self, x: Tensor, rows: Mapping[int, list[int]]) -> Tensor:
        norm: Any = self._module.get_submodule(self._head.norm)
        y: Tensor = norm(x)
        for slot, its in rows.items():
            own = self._own_of(slot)
            weight = own.get(f"{self._head.norm}.weight")
            if weight is not None:
                y[its] = layer_norm(x[its], norm.normalized_shape, weight, own.get(f"{self._head.norm}.bias"), norm.eps)
        return y

    def _own_of(self, slot: int) -> Mapping[str, Tensor]:
        """Return the head's parameters that the adapter in a slot brings; -1: no adapter."""
        return self._own[slot] if slot >= 0 else {}
