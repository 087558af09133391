"""Every family of encoders against transformers and peft: mixed lengths, tasks and adapters in one batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.contracts.options import Encode
from tests.worker.engine.encoder.encoder_oracle import MODELS, dequantized, make_oracle, texts, vectors_of

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]
# Largest difference from transformers, and from the same text in another batch.
TOLERANCE, ALONE = 1e-4, 1e-5
# Heads that one adapter brings whole; by default peft saves the classifier alone.
SAVED = {"bert": ["pooler"], "deberta-v3": ["pooler"], "modernbert": ["head"]}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_vectors_are_those_of_transformers_and_peft(
    name: str, tmp_path: Path, make_encoder: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    oracle = make_oracle(name, tmp_path)
    oracle.add_classifier("three", 1, 3, target_modules="all-linear", modules_to_save=SAVED.get(name))
    oracle.add_classifier("dora", 2, 2, target_modules="all-linear", use_dora=True)
    oracle.add_features("features", 3, target_modules="all-linear")
    cases = {}
    for index, ids in enumerate(texts(24, seed=5)):
        adapter = ("", "three", "dora", "features")[index % 4]
        task: Any = "embed" if adapter == "features" or index % 3 else "classify"
        pooling: Any = ("", "cls", "mean", "last")[index % 4] if task == "embed" else ""
        cases[str(index)] = (adapter, ids, Encode(task, pooling, pair_tokens=len(ids) // 3))
    expected = {key: oracle.vector(*case) for key, case in cases.items()}
    assert {len(vector) for vector in expected.values()} == {2, 3, 32}

    engine = make_encoder(oracle.directory, adapter_slots=3, rows=8, step_tokens=120)
    requests = [oracle.request(key, *case) for key, case in cases.items()]
    vectors = vectors_of(run_until_idle(engine, {0: requests[:16], 2: requests[16:]}))
    for key, vector in vectors.items():
        scale = expected[key].abs().max().clamp(min=1.0)
        assert (vector - expected[key]).abs().max() <= TOLERANCE * scale, (key, cases[key])
    assert engine.stats().steps < len(cases), "texts share steps"
    plain = oracle.vector("", *cases["1"][1:])
    assert plain.shape != expected["1"].shape or not torch.allclose(plain, expected["1"], atol=0.01)

    alone = vectors_of(run_until_idle(engine, {20 * at: [request] for at, request in enumerate(requests)}))
    for key, vector in alone.items():
        assert (vector - vectors[key]).abs().max() <= ALONE * vectors[key].abs().max().clamp(min=1.0)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.nightly) for name in ("deberta-v2", "modernbert")), "deberta-v3"]
)
def test_quantized_weights_give_the_vectors_of_their_dequantized_numbers(
    name: str, tmp_path: Path, make_encoder: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    scheme = "int8-zero-point+embeddings" if name == "deberta-v3" else "int8"
    plain = make_oracle(name, tmp_path / "plain")
    oracle = dequantized(plain, scheme, tmp_path / "dequantized")
    oracle.add_classifier("three", 1, 3, target_modules="all-linear", use_dora=True)
    engine = make_encoder(plain.directory, quantize=scheme)
    cases: dict[str, Any] = {}
    for index, ids in enumerate(texts(8, seed=4)):
        cases[str(index)] = ("", "three")[index % 2], ids, Encode("embed" if index % 4 < 2 else "classify")
    vectors = vectors_of(run_until_idle(engine, {0: [oracle.request(key, *case) for key, case in cases.items()]}))
    for key, case in cases.items():
        expected = oracle.vector(*case)
        assert (vectors[key] - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1.0), (key, case)
    assert not torch.allclose(vectors["0"], plain.vector(*cases["0"]), atol=1e-4)
