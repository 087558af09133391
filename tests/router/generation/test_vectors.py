"""Vectors of length 1 and probabilities of labels."""

from __future__ import annotations

import math

import pytest

from router.api.encoding import normalized, probabilities
from router.catalog.adapters import Classifier


def test_vectors_have_length_1_whatever_their_size() -> None:
    assert normalized((3.0, -4.0)) == [0.6, -0.8]
    for scale in (1e-30, 1.0, 1e30):
        assert math.hypot(*normalized((scale, 2 * scale, -3 * scale))) == pytest.approx(1.0)
    assert normalized((0.0, 0.0)) == (0.0, 0.0)


def test_logits_are_probabilities_by_the_kind_of_classifier() -> None:
    logits = (1.0, 0.0, -1e4)
    softmax = probabilities(logits, Classifier(("a", "b", "c")))
    assert softmax == pytest.approx([math.e / (math.e + 1), 1 / (math.e + 1), 0.0])
    assert probabilities((1e4, 1e4), Classifier(("a", "b"))) == [0.5, 0.5]
    several = probabilities((0.0, 800.0, -800.0), Classifier(("a", "b", "c"), "multi_label_classification"))
    assert several == pytest.approx([0.5, 1.0, 0.0])
    assert probabilities((2.0,), Classifier(("a",))) == pytest.approx([1 / (1 + math.exp(-2))])
    assert probabilities((2.5,), Classifier(("a",), "regression")) == (2.5,)
