"""DoRA (arXiv 2402.09353) as a plain pair and a gain for each output, so that a batch mixes it with anything.

    m / ||W + BA|| * (W x + B A x) + bias  =  y + gain * y + shift + B' A x        y = W x + bias, the base layer's own

with gain = m / ||W + BA|| - 1, B' = (1 + gain) B and shift = -gain * bias. The norms are of an output's weights. They
need no copy of W: ||W + BA||^2 = ||W||^2 + 2 (W A^T) . B + B (A A^T) B^T, of which the base layer computes W A^T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.lora.base_layers import BaseLayers


@dataclass(frozen=True, slots=True)
class Rescale:
    """What a DoRA adapter does to a layer's own output y: y + gain * y + shift, each [out_features]."""

    gain: Tensor
    shift: Tensor


def dora_rescale(base: BaseLayers, module: str, a: Tensor, b: Tensor, magnitude: Tensor) -> Rescale:
    """In float32, of a [rank, in_features] and b [out_features, rank] with its scaling; peft's lora/dora.py."""
    own, crossed = base.squares(module).double(), base.product(module, a).double()
    a, b = a.double(), b.double()
    added = (b @ (a @ a.t()) * b).sum(1)
    # Rounding must not make a square negative where BA takes W back.
    norms = (own + 2 * (crossed.t() * b).sum(1) + added).clamp_(min=0).sqrt()
    gain = (magnitude.double() / norms - 1).float()
    bias = base.bias(module)
    return Rescale(gain, torch.zeros_like(gain) if bias is None else -gain * bias)
