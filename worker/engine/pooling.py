"""Vectors of texts: pooled hidden states, and what can't be a vector."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from worker.engine_api import Failure

PendingVector = Callable[[], tuple[float, ...] | Failure]
_NOT_FINITE = Failure("INTERNAL", "NAN_LOGITS", "the model, with this adapter, gave numbers that are not finite")
NO_CLASSIFIER = Failure(
    "FAILED_PRECONDITION",
    "NO_CLASSIFIER",
    "neither the base model nor the adapter has a classifier; train the adapter with task_type SEQ_CLS",
    field="adapter",
)


def pooled(hidden: Tensor, pooling: str) -> Tensor:
    """Return [width] of a text's hidden states [tokens, width]; pooling is "cls", "mean" or "last"."""
    if pooling == "mean":
        return hidden.mean(0)
    return hidden[0] if pooling == "cls" else hidden[-1]


def to_vector(numbers: Tensor) -> tuple[float, ...] | Failure:
    """Return the numbers of a tensor on the host; a failure where one is not finite."""
    vector = tuple(numbers.tolist())
    return vector if all(map(math.isfinite, vector)) else _NOT_FINITE
