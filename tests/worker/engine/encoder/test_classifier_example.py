"""The documented example of a classifier in int8, on a model of few parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]
SMALL = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "position_buckets": 16,
}  # fmt: skip


def test_int8_is_four_times_smaller_and_gives_nearly_all_classes(tmp_path: Path) -> None:
    from examples import classifier_int8

    classifier_int8.make_model(tmp_path, classifier_int8.SIZES | SMALL)
    sides = classifier_int8.run(tmp_path, texts=12, longest=40, rounds=1)
    whole, small, original = sides["engine"], sides["engine, int8"], sides["transformers"]
    # Head, norms and biases stay as they are: much of so small a model.
    assert whole.bytes / small.bytes > 2.8
    assert whole.agreement(original) == 1.0
    assert (whole.logits - original.logits).abs().max() < 1e-4
    assert small.agreement(original) >= 0.9
    recipe = (sides["quantize_dynamic"].logits - original.logits).abs().max()
    assert 1e-4 < (small.logits - original.logits).abs().max() < recipe
