"""Several adapters in one request: the engine's answers are those of peft's add_weighted_adapter, kind "cat"."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.contracts.artifacts import MismatchError
from loraplex.contracts.artifacts.names import weighted_digest
from loraplex.contracts.options import FinishReason
from loraplex.worker.engine.lora.base_layers import ModelLayers
from loraplex.worker.engine.lora.weights import read_source
from loraplex.worker.engine.model.loader import load_model
from loraplex.worker.engine_api import AdapterPart, AdapterSource, NewSequence
from tests.worker.engine.peft_oracle import VOCAB, PeftOracle

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

CONFIGS: dict[str, dict[str, Any]] = {
    "wide": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]},
    "narrow": {"r": 3, "lora_alpha": 4, "target_modules": ["v_proj", "down_proj"]},
    "rooted": {"r": 16, "lora_alpha": 4, "use_rslora": True, "target_modules": ["o_proj", "gate_proj"]},
    "patterned": {
        "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"layers.1.mlp.down_proj": 12}, "alpha_pattern": {"q_proj": 1},
    },
}  # fmt: skip
# The first of each is plain: peft gives the sum the first one's use_rslora, and then scales it once more.
SETS: dict[str, list[tuple[str, float]]] = {
    "half and half": [("wide", 0.5), ("narrow", 0.5)],
    "taken away": [("wide", 1.25), ("rooted", -0.75)],
    "taken away alone": [("narrow", -2.0), ("patterned", -0.5)],
    "all": [("narrow", 0.75), ("patterned", 1.5), ("rooted", 0.5), ("wide", -0.25)],
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> PeftOracle:
    """The adapters, and peft's own sums of them."""
    oracle = PeftOracle("llama", tmp_path_factory.mktemp("sets"), CONFIGS, seed=7)
    for name, parts in SETS.items():
        oracle.peft.add_weighted_adapter(
            [part for part, _ in parts], [weight for _, weight in parts], name, combination_type="cat"
        )
    return oracle


def source_of(oracle: PeftOracle, parts: list[tuple[str, float]]) -> AdapterSource:
    """Return the source that a worker hands its engine."""
    digests = {name: f"digest of {name}" for name, _ in parts}
    return AdapterSource(
        weighted_digest((digests[name], weight) for name, weight in parts),
        parts=tuple(AdapterPart(digests[name], str(oracle.adapters[name]), weight) for name, weight in parts),
    )


def layers_of(oracle: PeftOracle) -> ModelLayers:
    return ModelLayers(load_model(str(oracle.directory)))


@pytest.mark.parametrize("slots", [10, 2])
def test_logits_and_tokens_are_those_of_pefts_sum(
    slots: int, oracle: PeftOracle, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    """In one batch with the parts themselves and rows without an adapter; also where they take turns in the slots."""
    engine = make_engine(oracle.directory, rows=12, kv_blocks=400, block_size=4, adapter_slots=slots, max_rank=40)
    chance = random.Random(5)
    requests: dict[str, tuple[str | None, NewSequence]] = {}
    for name in (*SETS, *CONFIGS, None, *SETS):
        source = source_of(oracle, SETS[name]) if name in SETS else name
        key = f"{len(requests)}: {name}"
        requests[key] = name, oracle.request(key, chance.choices(range(VOCAB), k=chance.choice([3, 11])), 12, source)
    outputs = run_until_idle(engine, {0: [request for _, request in requests.values()]})
    answers = {key: oracle.check(request, outputs[key], name) for key, (name, request) in requests.items()}
    assert len({ids[:6] for ids in answers.values()}) >= len(answers) - 2, f"answers are to be diverse: {answers}"


@pytest.mark.parametrize("name", SETS)
def test_the_product_is_the_weighted_sum_of_pefts_deltas(oracle: PeftOracle, name: str) -> None:
    read = read_source(source_of(oracle, SETS[name]), layers_of(oracle), 40)
    adapted = 0
    for module_name, module in oracle.peft.get_base_model().named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        parts = [(part, weight) for part, weight in SETS[name] if part in module.lora_A]
        assert (module_name in read.pairs) is bool(parts)
        if parts:
            adapted += 1
            pair = read.pairs[module_name]
            assert len(pair.a) == sum(module.r[part] for part, _ in parts)
            expected = sum(weight * module.get_delta_weight(part) for part, weight in parts)
            torch.testing.assert_close((pair.a.t() @ pair.b).t(), expected, rtol=1e-4, atol=1e-5)
    assert adapted == len(read.pairs) > 0
    assert read.rank == max(len(pair.a) for pair in read.pairs.values())


def test_a_set_of_one_is_the_adapter_times_its_weight(oracle: PeftOracle) -> None:
    alone = read_source(AdapterSource("digest", str(oracle.adapters["wide"])), layers_of(oracle), 8)
    half = read_source(source_of(oracle, [("wide", -0.5)]), layers_of(oracle), 8)
    for module, pair in alone.pairs.items():
        assert torch.equal(half.pairs[module].a, pair.a)
        assert torch.equal(half.pairs[module].b, -0.5 * pair.b)


def test_other_weights_of_the_same_adapters_share_no_block(
    oracle: PeftOracle, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    """A prompt under two sets, then again, is found in the cache by its own set alone."""
    engine = make_engine(oracle.directory, rows=4, kv_blocks=100, block_size=4, adapter_slots=4, max_rank=40)
    sets = {"half and half": SETS["half and half"], "taken away": SETS["taken away"]}
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    cached = []
    for turn in range(2):
        for name, parts in sets.items():
            request = oracle.request(f"{turn} {name}", prompt, 6, source_of(oracle, parts))
            outputs = run_until_idle(engine, {0: [replace(request, prompt_logprobs=None)]})[request.sequence_id]
            cached.append(outputs[0].cached_tokens)
            assert outputs[-1].finish is FinishReason.LENGTH
    assert cached == [0, 0, 12, 12]


def test_a_dora_adapter_is_no_part_of_a_set(oracle: PeftOracle, tmp_path: Path) -> None:
    """DoRA's change depends on the base's weight as it is; peft would give the sum other magnitudes."""
    dora = PeftOracle("llama", tmp_path, {"DoRA": CONFIGS["wide"] | {"use_dora": True}}, seed=7)
    base = layers_of(dora)
    parts = tuple(AdapterPart(name, str(one.adapters[name]), 0.5) for name, one in (("wide", oracle), ("DoRA", dora)))
    for source in (AdapterSource("set", parts=parts), AdapterSource("set of one", parts=parts[1:])):
        with pytest.raises(MismatchError, match="adapters: one of them is a DoRA adapter"):
            read_source(source, base, 16)


def test_ranks_that_add_up_to_too_much_fail_by_name(oracle: PeftOracle) -> None:
    """Only where they meet: what a router adds up is the most that they could come to."""
    parts = source_of(oracle, [("wide", 1.0), ("rooted", 1.0)])
    assert read_source(parts, layers_of(oracle), 24).rank == 24
    with pytest.raises(MismatchError, match=r"adapters: their ranks at .*o_proj add up to 24; this engine takes 20"):
        read_source(parts, layers_of(oracle), 20)
