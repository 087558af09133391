"""Pooling of a text's hidden states to one vector."""

from __future__ import annotations

from torch import Tensor


def pooled(hidden: Tensor, pooling: str) -> Tensor:
    """Return [width] of a text's hidden states [tokens, width]; pooling is "cls", "mean" or "last"."""
    if pooling == "mean":
        return hidden.mean(0)
    return hidden[0] if pooling == "cls" else hidden[-1]
