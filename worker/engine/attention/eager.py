"""Attention as it is defined, step by step, and who sees whom."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.engine.attention.paged import LayerCall


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, call: LayerCall, sinks: Tensor | None) -> Tensor:
    """Attention with a softcap or sinks: q [..., queries, dim]; k, v [..., positions, dim]; sinks [heads, queries]."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, ..., None].expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(weights[..., : k.shape[-2]], v)


def visibility(keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """Which key positions [1, k] each query position [q, 1] sees: [q, k]. Or the other way round."""
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    return seen


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where something is seen, minus infinity where not."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
