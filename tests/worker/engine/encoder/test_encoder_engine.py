"""Test an encoder's engine beside its numbers: refusals, failures, memory, long texts, signs of life."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.contracts.options import Encode, FinishReason, StoppingParams
from loraplex.encoders.body import Text, TextAttention
from loraplex.worker.engine_api import AdapterSource, EngineConfig, NewSequence, SequenceRefusedError
from loraplex.worker.io.results import warm_up_sequence
from tests.worker.engine.encoder.encoder_oracle import EncoderOracle, make_oracle, texts, vectors_of

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]
EMBED, CLASSIFY = Encode("embed"), Encode("classify")


def text(name: str, ids: tuple[int, ...] = (3, 4, 5), encode: Encode | None = EMBED, **fields: Any) -> NewSequence:
    return NewSequence(name, ids, stopping=StoppingParams(max_tokens=0), encode=encode, **fields)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> EncoderOracle:
    """A BERT as it is published: without a classifier, saved from the encoder with its pooler."""
    oracle = make_oracle("bert", tmp_path_factory.mktemp("bert"))
    oracle.add_classifier("own", 1, 3, target_modules=["query", "value"])
    oracle.add_features("plain", 2, target_modules=["query", "value"])
    body: Any = oracle.tuned[""].body
    body.save_pretrained(oracle.directory)
    return oracle


def test_an_encoder_without_a_classifier_classifies_by_adapters_that_bring_one(
    bert: EncoderOracle, make_encoder: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    engine = make_encoder(bert.directory)
    cases = {str(index): ("own", ids, CLASSIFY) for index, ids in enumerate(texts(3, seed=1))}
    cases |= {"base": ("", (7, 8, 9), EMBED), "plain": ("plain", (7, 8, 9), EMBED)}
    vectors = vectors_of(run_until_idle(engine, {0: [bert.request(name, *case) for name, case in cases.items()]}))
    for name, case in cases.items():
        assert torch.allclose(vectors[name], bert.vector(*case), atol=1e-4), name
    with pytest.raises(SequenceRefusedError, match="adapter: neither the base model nor the adapter has a classifier"):
        engine.add_sequence(text("a", encode=CLASSIFY))
    outputs = run_until_idle(engine, {0: [bert.request("b", "plain", (1, 2), CLASSIFY)]})
    assert [(one.finish, one.failure.code, one.failure.reason) for one in outputs["b"]] == [
        (FinishReason.FAILED, "FAILED_PRECONDITION", "NO_CLASSIFIER")
    ]


def test_an_encoder_makes_the_step_that_proves_an_engine_after_a_death(
    bert: EncoderOracle, make_encoder: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    """A worker whose engine refused it would never serve again."""
    proof = warm_up_sequence(generates=False)
    [output] = run_until_idle(make_encoder(bert.directory), {0: [proof]})[proof.sequence_id]
    assert (output.finish, output.failure, len(output.vector)) == (FinishReason.LENGTH, None, 32)


def test_what_an_encoder_cannot_do_is_refused_in_one_line(
    bert: EncoderOracle, make_encoder: Callable[..., Any], run_until_idle: Callable[..., Any], tmp_path: Path
) -> None:
    engine = make_encoder(bert.directory)
    for sequence, message in [
        (text("a", tuple([5] * 65)), r"prompt_ids: has 65 tokens; this model takes 64: truncate the text"),
        (text("a", encode=None), "encode: is missing: this model gives vectors, no answers"),
        (text("a", encode=Encode("embed", pair_tokens=4)), "encode.pair_tokens: must lie between 0"),
        (text("a", (60,)), "60 is not a token id"),
    ]:
        with pytest.raises(SequenceRefusedError, match=message):
            engine.add_sequence(sequence)
    engine.add_sequence(text("a", tuple([5] * 64)))
    with pytest.raises(SequenceRefusedError, match="a is running already"):
        engine.add_sequence(text("a"))
    [output] = engine.step()
    assert len(output.vector) == 32
    outputs = run_until_idle(engine, {0: [text("b", adapter=AdapterSource("missing", str(tmp_path)))]})
    assert [one.failure.reason for one in outputs["b"]] == ["ADAPTER_UNLOADABLE"]


def test_a_broken_head_is_refused_when_it_is_read(bert: EncoderOracle, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from loraplex.contracts.artifacts import MismatchError
    from loraplex.encoders.loader import load_encoder
    from loraplex.worker.engine.lora.base_layers import ModelLayers
    from loraplex.worker.engine.lora.weights import read_adapter

    own = bert.tuned["own"].source
    assert own is not None
    tensors = load_file(Path(own.directory) / "adapter_model.safetensors")
    config = json.loads((Path(own.directory) / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.classifier.weight"
    save_file(tensors | {name: tensors[name][:, :5].contiguous()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(MismatchError, match=r"classifier.weight has the shape \[3, 5\], not \[3, 32\]"):
        read_adapter(str(tmp_path), ModelLayers(load_encoder(str(bert.directory))), 8)


def test_texts_wait_again_where_memory_is_not_enough_and_one_alone_fails(
    bert: EncoderOracle,
    make_encoder: Callable[..., Any],
    run_until_idle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_encoder(bert.directory)
    whole, most = engine._runner.run, 70

    def run(batch: Any) -> Any:
        if sum(len(one.ids) for one in batch) > most:
            raise MemoryError
        return whole(batch)

    monkeypatch.setattr(engine._runner, "run", run)
    requests = [bert.request(str(index), "own", ids, EMBED) for index, ids in enumerate(texts(9, seed=2))]
    outputs = run_until_idle(engine, {0: requests})
    assert len(vectors_of(outputs)) == 9
    assert engine.stats().preemptions > 0
    most = 3
    outputs = run_until_idle(engine, {0: [text("long", (1, 2, 3, 4)), text("short")]})
    assert [outputs[name][-1].finish for name in ("long", "short")] == [FinishReason.FAILED, FinishReason.LENGTH]


def test_tenants_share_the_texts_of_a_step(bert: EncoderOracle, make_encoder: Callable[..., Any]) -> None:
    engine = make_encoder(bert.directory, rows=4)
    assert engine.limits.rows == 8
    for index in range(6):
        engine.add_sequence(text(f"a{index}", tenant="a"))
    engine.add_sequence(text("b0", tenant="b"))
    engine.add_sequence(replace(text("gone"), tenant="b", priority=1))
    engine.abort("gone")
    first = {output.sequence_id for output in engine.step()}
    assert first == {"a0", "a1", "a2", "b0"}
    assert {output.sequence_id for output in engine.step()} == {"a3", "a4", "a5"}
    assert not engine.has_work()


def test_a_step_gives_signs_of_life(bert: EncoderOracle, monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex.encoders import engine as build

    monkeypatch.setattr(build, "_SIGN_S", 0.0)
    signs: list[int] = []
    begun: list[str] = []
    engine = build.build_encoder(
        EngineConfig(str(bert.directory), dtype="float32"), on_begun=begun.append, on_progress=lambda: signs.append(1)
    )
    assert not signs, "the process can't send before the engine is there"
    engine.add_sequence(text("a"))
    engine.step()
    engine.close()
    assert (len(signs), begun) == (2, ["a"])  # one a layer


def test_windows_of_long_texts_are_those_of_the_whole_matrix() -> None:
    from loraplex.worker.engine.attention.paged import LayerCall

    generator = torch.Generator().manual_seed(0)
    length, window = 700, 9
    q, k, v = (torch.randn(length + 5, 2, 8, generator=generator) for _ in range(3))
    step = TextAttention((Text(0, 5, -1), Text(5, length + 5, -1)))
    out = step.attend(LayerCall(0, q, k, v, 0.3, window=window))[5:]
    places = torch.arange(length)
    near = (places[:, None] - places).abs() < window
    scores = torch.einsum("qhd,khd->hqk", q[5:], k[5:]) * 0.3
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~near, float("-inf")).softmax(-1), v[5:])
    assert torch.allclose(out, expected, atol=1e-5)
