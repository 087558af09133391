"""Layers over quantized weights. They compute with the dequantized weight, or on CUDA by the kernel of its scheme."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from loraplex.worker.engine.quantized.weight import QuantizedWeight, round_inputs


class QuantizedModule(nn.Module):
    """A module with a quantized weight, which moves with the module; casts do not concern it."""

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.weight = weight

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        """Move the weight where `fn` moves an integer tensor, which it does not cast."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight = self.weight.to(fn(torch.empty(0, dtype=torch.int8, device=self.weight.codes.device)).device)
        return self


class QuantizedLinear(QuantizedModule):
    """A linear layer over a quantized weight: [..., in_features] to [..., out_features], in the dtype of its input."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        super().__init__(weight)
        self.in_features = weight.in_features
        self.out_features = weight.out_features
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the transposed dequantized weight, and add the bias where there is one."""
        if self.weight.codes.is_cuda and (cuda := _cuda()).can_multiply(self.weight):
            y: Tensor = cuda.multiply(x, self.weight, self.bias)
            return y
        rounded = round_inputs(x).to(x.dtype) if self.weight.dynamic else x
        return linear(rounded, self.weight.dequantize(x.dtype), self.bias)


@cache
def _cuda() -> Any:
    from loraplex.worker.engine.quantized import cuda  # Triton is there only with CUDA

    return cuda


# The layers that adapters change, that are fused and packed.
AnyLinear = nn.Linear | QuantizedLinear


def is_linear(module: object) -> TypeGuard[AnyLinear]:
    """Tell whether a module is a linear layer, quantized or not; subclasses compute something else."""
    return type(module) in (nn.Linear, QuantizedLinear)


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer over a weight [out_features, in_features], which is not copied."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


class QuantizedEmbedding(QuantizedModule):
    """Token embeddings [num_embeddings, embedding_dim]: looks up ids [...] to [..., embedding_dim].

    Some models multiply by `embed_scale`, which is then an attribute as on their own layer.
    """

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, embed_scale: float | None = None) -> None:
        super().__init__(weight)
        self.num_embeddings = weight.out_features
        self.embedding_dim = weight.in_features
        self.dtype = dtype
        if embed_scale is not None:
            self.embed_scale = embed_scale

    def forward(self, ids: Tensor) -> Tensor:
        """Dequantize the rows of ids [...]: [..., embedding_dim]."""
        y = self.weight.rows(ids.reshape(-1)).dequantize(self.dtype)
        if hasattr(self, "embed_scale"):
            y *= torch.tensor(self.embed_scale, dtype=self.dtype)
        return y.view(*ids.shape, self.embedding_dim)
