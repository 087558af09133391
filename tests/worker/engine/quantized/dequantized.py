"""The oracle of quantized models: transformers' float32 model with the dequantized weights of the engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from worker.engine.model.loader import load_model
from worker.engine.quantized.weight import QuantizedWeight


@torch.no_grad()
def dequantize_into(model: Any, directory: Path | str, scheme: str = "") -> int:
    """Give a float32 model the weights that the engine loads from a directory; how many of them are quantized."""
    ours = load_model(str(directory), "cpu", "float32", scheme).module
    count = 0
    for name, layer in ours.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, QuantizedWeight):
            place = model.get_submodule(name)
            place = getattr(place, "base_layer", place)  # peft's layers wrap those of the model
            numbers = weight.dequantize()
            place.weight.copy_(numbers.t() if isinstance(place, Conv1D) else numbers)
            count += 1
    return count
