"""Vectors as clients get them: scaled to length 1, or as probabilities of a classifier's labels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.catalog.classifiers import Classifier


def normalized(values: Sequence[float]) -> Sequence[float]:
    """Return a vector scaled to the Euclidean length 1; one of zeros stays."""
    length = math.hypot(*values)
    return [value / length for value in values] if length else values


def probabilities(logits: Sequence[float], classifier: Classifier) -> Sequence[float]:
    """Return the probability of each label; of a regression its values."""
    if classifier.problem_type == "regression":
        return logits
    if len(logits) == 1 or classifier.problem_type == "multi_label_classification":
        return [_logistic(logit) for logit in logits]
    largest = max(logits)
    powers = [math.exp(logit - largest) for logit in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]


def _logistic(logit: float) -> float:
    # The exponent is never positive: no overflow.
    power = math.exp(-abs(logit))
    return 1 / (1 + power) if logit >= 0 else power / (1 + power)
