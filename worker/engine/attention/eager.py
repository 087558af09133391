"""Attention operator by operator (transformers' eager form), and the masks of causal and sliding-window attention."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.engine.attention.paged import LayerCall


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, call: LayerCall, sinks: Tensor | None) -> Tensor:
    """Attend with a softcap or sinks, which scaled_dot_product_attention has not.

    q [..., queries, dim]; k, v [..., positions, dim]; mask [queries, positions], additive; sinks [heads, queries]. The
    formulas are those of LayerCall.
    """
    scores = torch.matmul(q, k.transpose(-1, -2)) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, ..., None].expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(weights[..., : k.shape[-2]], v)


def visibility(keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """Return the key positions [1, k] that query positions [q, 1] attend to: bool [q, k]. Transposed, [k, q]."""
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    return seen


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask: 0 where `seen` is true, minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
