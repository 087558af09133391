"""The oracle of quantized models: transformers' float32 model with the engine's dequantized numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from loraplex.worker.engine.model.loader import load_model
from loraplex.worker.engine.quantized.weight import QuantizedWeight
from tests.worker.engine.attention_batches import quantized


@torch.no_grad()
def dequantize_into(model: Any, directory: Path | str, scheme: str = "") -> int:
    """Give a float32 model the weights that the engine loads from a directory; how many of them are quantized."""
    ours = load_model(str(directory), "cpu", "float32", scheme).module
    count = 0
    for name, layer in ours.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, QuantizedWeight):
            place = model.get_submodule(name)
            # peft's layers wrap those of the model
            place = getattr(place, "base_layer", None) or getattr(place, "original_module", place)
            numbers = weight.dequantize()
            place.weight.copy_(numbers.t() if isinstance(place, Conv1D) else numbers)
            count += 1
    return count


def quantize_keys_and_values(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' eager attention of a model's family see keys and values that were in a cache of int8."""
    family = sys.modules[type(model).__module__]
    own = family.eager_attention_forward

    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        return own(module, query, *map(_kept, (key, value)), *rest, **options)

    monkeypatch.setattr(family, "eager_attention_forward", forward)


def _kept(numbers: Tensor) -> Tensor:
    codes, scales = quantized(numbers)
    return codes * scales[..., None]
