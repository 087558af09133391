"""Adapters of experts, peft's target_parameters: logits and greedy tokens are peft's own, in every layout of experts.

Beside them adapters of other layers, and rows without one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapter_store.validate import validate_adapter
from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.worker.engine.lora.base_layers import ModelLayers
from loraplex.worker.engine.lora.weights import read_adapter, read_source
from loraplex.worker.engine.model.loader import load_model
from loraplex.worker.engine_api import AdapterPart, AdapterSource
from tests.worker.engine.model.tiny_families import EXPERTS, LATENT
from tests.worker.engine.peft_oracle import PeftOracle, check_batch

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

BOTH = ["gate_up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "experts alone": {"r": 3, "lora_alpha": 8, "target_modules": [], "target_parameters": BOTH},
    "patterns": {
        "r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ["q_proj", "o_proj"], "target_parameters": BOTH,
        "exclude_modules": r".*layers\.0\..*o_proj",
        "rank_pattern": {"experts.down_proj": 7, r"layers\.1.*\.gate_up_proj": 2}, "alpha_pattern": {"down_proj": 3},
    },
    "other layers": {"r": 5, "lora_alpha": 5, "target_modules": ["k_proj", "o_proj"]},
}  # fmt: skip
# Experts that are stored one by one, under two names; joined, under two names; transposed, with interleaved gates and
# biases; beside shared experts and dense layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "olmoe": {},
    "gpt_oss": {},
    "granitemoe": {},
    "deepseek_v3": LATENT,
}
SETTINGS: dict[str, Any] = {
    "rows": 8, "kv_blocks": 400, "block_size": 4, "adapter_slots": 3, "max_rank": 8, "step_tokens": 24,
}  # fmt: skip


def shape_of(model_type: str) -> dict[str, Any]:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 24}
    return sizes | EXPERTS | (FAMILIES[model_type] or {"head_dim": 8})


def kinds_of(model_type: str) -> dict[str, dict[str, Any]]:
    """The kinds with the names of the family's layers."""
    names = {"q_proj": "q_b_proj", "k_proj": "kv_b_proj"} if model_type == "deepseek_v3" else {}
    # Layers that a family had before transformers joined them: peft makes target_parameters and patterns of them.
    former = {"r": 2, "lora_alpha": 6, "target_modules": ["gate_proj", "up_proj", "down_proj", "v_proj"]}
    return ({"former names": former} if model_type == "qwen3_moe" else {}) | {
        name: kind | {"target_modules": [names.get(one, one) for one in kind["target_modules"]]}
        for name, kind in KINDS.items()
    }


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_and_tokens_are_pefts(
    model_type: str, tmp_path: Path, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    oracle = PeftOracle(model_type, tmp_path, kinds_of(model_type), shape=shape_of(model_type))
    base = read_base_model(str(oracle.directory))
    for directory in oracle.adapters.values():
        if (config := validate_adapter(directory, base).config) is not None:
            (directory / CONFIG_FILE).write_bytes(config)
    engine = make_engine(oracle.directory, **SETTINGS)
    check_batch(oracle, engine, run_until_idle, seed=3)


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> PeftOracle:
    """Adapters of one tensor alone, whose name peft does not write."""
    kinds = {
        f"{name} of {rank}": {"r": rank, "lora_alpha": 4, "target_modules": [], "target_parameters": ["down_proj"]}
        for name, rank in (("the first", 2), ("the second", 3))
    }
    return PeftOracle("mixtral", tmp_path_factory.mktemp("one"), kinds, shape=shape_of("mixtral"))


@pytest.mark.parametrize("by_panels", [True, False])
def test_an_adapter_of_one_tensor_is_pefts_without_panels_too(
    by_panels: bool, of_one: PeftOracle, make_engine: Any, run_until_idle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_panels:
        monkeypatch.setattr("loraplex.worker.engine.linear.experts.panels_work", lambda *_: False)
    base = read_base_model(str(of_one.directory))
    assert [validate_adapter(one, base).rank for one in of_one.adapters.values()] == [2, 3]
    check_batch(of_one, make_engine(of_one.directory, **SETTINGS | {"adapter_slots": 1}), run_until_idle, seed=4)


def test_an_adapter_in_the_layout_of_peft_before_0_19_is_the_same(
    tmp_path: Path, make_engine: Any, run_until_idle: Any
) -> None:
    """Write it as peft 0.18 did; here gate_up_proj has as many inputs as outputs, so that sizes do not tell."""
    kinds = {name: KINDS[name] for name in ("experts alone", "other layers")}
    oracle = PeftOracle("qwen3_moe", tmp_path, kinds, shape=shape_of("qwen3_moe"))
    base, adapter = read_base_model(str(oracle.directory)), oracle.adapters["experts alone"]
    tensors = load_file(adapter / WEIGHTS_FILE)
    for name in [name for name in tensors if "lora_A" in name]:
        of_b = name.replace("lora_A", "lora_B")
        a, b = tensors[name].view(4, 3, -1), tensors[of_b].view(-1, 3, 4)
        # peft 0.18's change of expert e: the sum over ranks r of A[e, r, output] * B[input, r, e].
        tensors[name], tensors[of_b] = b.permute(2, 1, 0).reshape(12, -1), a.permute(2, 1, 0).reshape(-1, 12)
    save_file({name: one.contiguous() for name, one in tensors.items()}, adapter / WEIGHTS_FILE)
    config = json.loads((adapter / CONFIG_FILE).read_bytes())
    for version in ("", "0.19.2.dev0@abc"):
        (adapter / CONFIG_FILE).write_text(json.dumps(config | {"peft_version": version}))
        with pytest.raises(ArtifactError, match="layout of experts") as caught:
            validate_adapter(adapter, base)
        assert caught.value.subject == "peft_version"
    (adapter / CONFIG_FILE).write_text(json.dumps(config | {"peft_version": "0.18.1"}))
    assert validate_adapter(adapter, base).rank == 3
    check_batch(oracle, make_engine(oracle.directory, **SETTINGS), run_until_idle, seed=4)


def test_a_weighted_set_adds_up_the_changes_of_each_expert(of_one: PeftOracle) -> None:
    base = ModelLayers(load_model(str(of_one.directory)))
    weighted = zip(of_one.adapters.items(), (2, -1), strict=True)
    parts = tuple(AdapterPart(name, str(path), weight) for (name, path), weight in weighted)
    read = read_source(AdapterSource("both", parts=parts), base, 5)
    name = "model.layers.1.mlp.experts.down_proj"
    expected = torch.zeros(4, 24, 32)
    for part in parts:
        pair = read_adapter(part.directory, base, 5, part.weight).pairs[name]
        expected += pair.a.transpose(1, 2) @ pair.b
    assert torch.allclose(read.pairs[name].a.transpose(1, 2) @ read.pairs[name].b, expected, atol=1e-6)
    assert read.rank == 5


@pytest.mark.parametrize(
    ("fields", "subject", "message"),
    [
        (
            {"target_parameters": ["mlp.gate.weight", *BOTH]},
            "target_parameters",
            "'mlp.gate.weight' is not a tensor",
        ),
        ({"target_parameters": ["experts.down_proj_bias"]}, "target_parameters", "no routers or biases"),
        ({"target_parameters": None}, WEIGHTS_FILE, "experts.lora_A.weight belongs to none of the experts"),
        ({"target_parameters": BOTH}, WEIGHTS_FILE, "has no tensors of model.layers.0.mlp.experts.gate_up_proj"),
        ({"target_parameters": ["gate_up_proj"]}, WEIGHTS_FILE, "gate_up_proj is for"),
        ({"target_parameters": "down_proj"}, "target_parameters", "is not a list of names"),
        ({"use_dora": True}, "target_parameters", "DoRA of experts is not served"),
        ({"r": 3}, WEIGHTS_FILE, "has rank 2"),
        ({}, WEIGHTS_FILE, "lora_A has 9 rows, which 4 experts cannot share"),
        ({"revision": "named"}, WEIGHTS_FILE, "experts.down_proj.lora_[AB].weight belongs to none of the experts"),
    ],
)
def test_what_does_not_fit_is_named_by_store_and_worker(
    fields: dict[str, Any], subject: str, message: str, of_one: PeftOracle, tmp_path: Path
) -> None:
    adapter = of_one.adapters["the first of 2"]
    config = json.loads((adapter / CONFIG_FILE).read_bytes()) | fields
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    tensors = load_file(adapter / WEIGHTS_FILE)
    if not fields:
        tensors = {name: torch.ones(9, 24) if "lora_A" in name else torch.ones(32, 9) for name in tensors}
    if "revision" in fields:
        tensors |= {name.replace(".lora_", ".down_proj.lora_"): one.clone() for name, one in tensors.items()}
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    base = ModelLayers(load_model(str(of_one.directory)))
    with pytest.raises(ArtifactError, match=message) as by_store:
        validate_adapter(tmp_path, read_base_model(str(of_one.directory)))
    with pytest.raises(ArtifactError, match=message) as by_worker:
        read_adapter(str(tmp_path), base, 8)
    assert by_store.value.subject == by_worker.value.subject == subject


def test_an_engine_that_has_no_slots_for_experts_names_the_flag(of_one: PeftOracle) -> None:
    base = ModelLayers(load_model(str(of_one.directory)))
    directory = str(of_one.adapters["the first of 2"])
    with pytest.raises(ArtifactError, match=r"has rank 2; this engine takes 0 \(--max-expert-rank\)"):
        read_adapter(directory, base, 8, max_expert_rank=0)
    assert read_adapter(directory, base, 1, max_expert_rank=2).rank == 2
