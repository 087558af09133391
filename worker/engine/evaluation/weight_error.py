"""The size and the error of a quantized model's weights, before its layers are replaced for computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.engine.quantized.weight import QuantizedWeight


@dataclass
class WeightError:
    """The error of the weights of one kind of layer, such as q_proj: of `layers` layers with `weights` weights."""

    kind: str
    layers: int = 0
    weights: int = 0
    max_error: float = 0.0
    # Sums of the absolute errors, of their squares, and of the squares of the original weights.
    absolute: float = 0.0
    squares: float = 0.0
    own_squares: float = 0.0

    @property
    def mean_error(self) -> float:
        """Return the mean absolute error."""
        return self.absolute / self.weights

    @property
    def relative_error(self) -> float:
        """Return the norm of the error over the norm of the weights."""
        return float((self.squares / self.own_squares) ** 0.5) if self.own_squares else 0.0

    def add(self, original: Tensor, quantized: Tensor) -> None:
        """Add a layer: its weight as given, and dequantized."""
        error = (quantized.float() - original.float()).abs_()
        self.layers += 1
        self.weights += error.numel()
        self.max_error = max(self.max_error, float(error.max()))
        self.absolute += float(error.sum(dtype=torch.float64))
        self.squares += float(error.square_().sum(dtype=torch.float64))
        self.own_squares += float(original.float().square().sum(dtype=torch.float64))


@torch.inference_mode()
def weight_errors(original: nn.Module, quantized: nn.Module) -> list[WeightError]:
    """Compare each quantized weight with the original's, by kind of layer in the order of the model."""
    found: dict[str, WeightError] = {}
    for name, module in quantized.named_modules():
        weight = _quantized_weight(module)
        if weight is not None:
            kind = name.rpartition(".")[2]
            own: Any = original.get_submodule(name).weight
            found.setdefault(kind, WeightError(kind)).add(own, weight.dequantize().to(own.device))
    return list(found.values())


def weight_bytes(model: nn.Module, number_bytes: int) -> int:
    """Return the bytes of a model's weights; those that are not quantized count `number_bytes` each."""
    size = sum(parameter.numel() for parameter in model.parameters()) * number_bytes
    # By identity: token embeddings and output head may share a weight.
    weights = {id(weight): weight for module in model.modules() if (weight := _quantized_weight(module)) is not None}
    for weight in weights.values():
        tensors = (weight.codes, weight.scales, weight.zeros)
        size += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return size


def _quantized_weight(module: nn.Module) -> QuantizedWeight | None:
    weight: Any = getattr(module, "weight", None)
    return weight if isinstance(weight, QuantizedWeight) else None
