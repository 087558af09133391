"""Quantizes float weights in the schemes of artifacts/quantization.py."""

from __future__ import annotations

import torch
from torch import Tensor

from artifacts.base_modules import LinearWeight
from artifacts.quantization import Quantization
from worker.engine.quantized.weight import QuantizedWeight, concatenate, quantize

# Number of rows that are quantized at once: rounding makes several float32 copies.
_PIECE_ROWS = 4096
_FLOAT8 = torch.float8_e4m3fn


def quantize_tensor(tensor: Tensor, weight: LinearWeight, scheme: Quantization) -> QuantizedWeight:
    """Quantize a checkpoint's tensor of a weight; rows of embeddings are tokens, of other weights outputs."""
    return quantize_weight(tensor.t() if weight.input_first and not weight.is_embedding else tensor, scheme)


def quantize_weight(weight: Tensor, scheme: Quantization) -> QuantizedWeight:
    """Quantize a weight [out_features, in_features]; the same weight always gives the same codes."""
    return concatenate([_quantize(piece, scheme) for piece in torch.split(weight, _PIECE_ROWS)])


def _quantize(weight: Tensor, scheme: Quantization) -> QuantizedWeight:
    if not scheme.floating:
        return quantize(weight, scheme.bits, scheme.group or None, symmetric=scheme.symmetric)
    wide = weight.detach().float()
    scales = (wide.abs().amax(1, keepdim=True) / torch.finfo(_FLOAT8).max).clamp(min=torch.finfo(torch.float32).tiny)
    return QuantizedWeight((wide / scales).to(_FLOAT8), scales, None, scheme.bits, weight.shape[1])
