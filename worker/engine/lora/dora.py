"""DoRA (arXiv 2402.09353) as a plain LoRA pair plus a gain and a shift per output, so that any batch can mix it.

    m / ||W + BA|| * (W x + B A x) + bias  =  y + gain * y + shift + B' A x        y = W x + bias, the base output

with gain = m / ||W + BA|| - 1, B' = (1 + gain) B and shift = -gain * bias. Each norm is over one output's weights,
and needs no copy of W: ||W + BA||^2 = ||W||^2 + 2 (W A^T) . B + B (A A^T) B^T, where the base layer computes W A^T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.lora.base_layers import BaseLayers


@dataclass(frozen=True, slots=True)
class Rescale:
    """A DoRA adapter's change of the base layer's output y: y + gain * y + shift, both [out_features]."""

    gain: Tensor
    shift: Tensor


def dora_rescale(base: BaseLayers, module: str, a: Tensor, b: Tensor, magnitude: Tensor) -> Rescale:
    """Compute the gain and shift of a DoRA adapter, in float32.

    a [rank, in_features]; b [out_features, rank], scaled by alpha / rank; magnitude [out_features]. The formula is that
    of peft's lora/dora.py.
    """
    own, crossed = base.squares(module).double(), base.product(module, a).double()
    a, b = a.double(), b.double()
    added = (b @ (a @ a.t()) * b).sum(1)
    # Where BA nearly cancels W, rounding could make the square negative.
    norms = (own + 2 * (crossed.t() * b).sum(1) + added).clamp_(min=0).sqrt()
    gain = (magnitude.double() / norms - 1).float()
    bias = base.bias(module)
    return Rescale(gain, torch.zeros_like(gain) if bias is None else -gain * bias)
