"""The exactness matrix: for every kind of adapter that is served, the logits and the greedy tokens are peft's own.

All adapters of a model in one batch, beside rows without one; prompts in chunks beside decodes.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapter_store.validate import validate_adapter
from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.checkpoint import read_header
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE, base_copies
from loraplex.worker.engine.lora.base_layers import LoadedBase, ModelLayers
from loraplex.worker.engine.lora.weights import read_adapter
from loraplex.worker.engine.model.loader import load_model
from loraplex.worker.engine_api import NewSequence
from tests.worker.engine.peft_oracle import VOCAB, PeftOracle, check_batch

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Every field that is served, and ranks 1 to 256, in the shape of Llama and with Qwen's biases.
SPLIT: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "down_proj"]},
    "rank 3, alpha 1": {"r": 3, "lora_alpha": 1, "target_modules": ATTENTION},
    "rank 8": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "rank 64": {"r": 64, "lora_alpha": 100, "target_modules": ["gate_proj", "up_proj", "v_proj"]},
    "rank 256": {"r": 256, "lora_alpha": 48, "target_modules": ["k_proj", "down_proj", "o_proj"]},
    "fractional alpha": {"r": 5, "lora_alpha": 2.5, "target_modules": ["up_proj"]},
    "rank_pattern": {
        "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 2, r"layers\.1\.mlp\.down_proj": 12, "^model.layers.0.self_attn.q_proj": 31},
    },
    "alpha_pattern": {
        "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"],
        "alpha_pattern": {"down_proj": 24, "layers.0.self_attn.q_proj": 3}, "rank_pattern": {"mlp.down_proj": 9},
    },
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["o_proj", "up_proj", "gate_proj"]},
    "rslora with patterns": {
        "r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ATTENTION,
        "rank_pattern": {"q_proj": 25}, "alpha_pattern": {"o_proj": 1},
    },
    "regex": {"r": 6, "lora_alpha": 9, "target_modules": r".*layers\.[02]\..*(up|k)_proj"},
    "layers_to_transform": {"r": 7, "lora_alpha": 14, "target_modules": ATTENTION, "layers_to_transform": [1]},
    "layers_pattern": {
        "r": 2, "lora_alpha": 8, "target_modules": ["down_proj"], "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "exclude_modules": {
        "r": 8, "lora_alpha": 8, "target_modules": "all-linear", "exclude_modules": ["v_proj", "up_proj"],
    },
    "trained otherwise": {
        "r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "lora_dropout": 0.3, "init_lora_weights": "gaussian",
    },
}  # fmt: skip
# Of which a model's own kind adds the names of its embeddings and output head.
BEYOND: dict[str, dict[str, Any]] = {
    "DoRA": {"r": 8, "lora_alpha": 16, "use_dora": True, "target_modules": "all-linear"},
    "DoRA of a few": {
        "r": 4, "lora_alpha": 8, "use_dora": True, "use_rslora": True, "target_modules": ["v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 20}, "alpha_pattern": {"down_proj": 2},
    },
    "output": {"r": 6, "lora_alpha": 12, "target_modules": ["lm_head"]},
    "input": {"r": 5, "lora_alpha": 10, "target_modules": ["embed_tokens", "o_proj"]},
    "both ends": {
        "r": 3, "lora_alpha": 8, "use_rslora": True, "target_modules": ["embed_tokens", "lm_head", "up_proj"],
    },
    "DoRA of both ends": {
        "r": 4, "lora_alpha": 6, "use_dora": True, "target_modules": ["embed_tokens", "lm_head", "k_proj"],
    },
}  # fmt: skip


def fused(attention: list[str], mlp: list[str], **more: Any) -> dict[str, dict[str, Any]]:
    """A few kinds for a model whose projections are fused, or stored the other way round."""
    kinds: dict[str, dict[str, Any]] = {
        "projections": {"r": 6, "lora_alpha": 12, "target_modules": attention},
        "mlp, rslora": {"r": 16, "lora_alpha": 6, "use_rslora": True, "target_modules": mlp},
        "all-linear": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"},
        "patterns": {
            "r": 4, "lora_alpha": 8, "target_modules": [*attention, *mlp],
            "rank_pattern": {attention[0]: 40, f"1.*{mlp[-1]}": 1}, "alpha_pattern": {mlp[0]: 16},
        },
    }  # fmt: skip
    kinds["DoRA"] = {"r": 5, "lora_alpha": 7, "use_dora": True, "target_modules": [*attention, *mlp]}
    return {name: kind | more for name, kind in kinds.items()}


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": SPLIT | BEYOND,
    "qwen2": {name: SPLIT[name] for name in ("rank 1", "rank 8", "rank 256", "rank_pattern", "rslora")} | BEYOND,
    "gpt2": fused(["c_attn", "attn.c_proj"], ["c_fc", "mlp.c_proj"], fan_in_fan_out=True),
    "phi3": fused(["qkv_proj", "o_proj"], ["gate_up_proj", "down_proj"]),
    "gpt_neox": fused(["query_key_value", "attention.dense"], ["dense_h_to_4h", "dense_4h_to_h"]),
}
# With one weight for both ends; and with embeddings that are scaled.
TIED: dict[str, list[str]] = {
    "qwen2": ["embed_tokens", "lm_head"],
    "gpt2": ["wte", "lm_head"],
    "gemma3_text": ["embed_tokens"],
}


def on_cuda(loaded: LoadedBase) -> ModelLayers:
    """The layers of a model as on CUDA, where adapters may not change both ends."""
    return ModelLayers(replace(loaded, device=torch.device("cuda")))


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PeftOracle]:
    """Call with a model type: its model and adapters, made once, as the store keeps them."""
    made: dict[str, PeftOracle] = {}

    def oracle(model_type: str) -> PeftOracle:
        if model_type not in made:
            oracle = PeftOracle(model_type, tmp_path_factory.mktemp(model_type), CASES[model_type])
            base = read_base_model(str(oracle.directory))
            for directory in oracle.adapters.values():
                if (config := validate_adapter(directory, base).config) is not None:
                    (directory / CONFIG_FILE).write_bytes(config)
            made[model_type] = oracle
        return made[model_type]

    return oracle


@pytest.mark.parametrize("model_type", CASES)
def test_logits_and_tokens_are_pefts(
    model_type: str,
    oracles: Callable[[str], PeftOracle],
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
) -> None:
    oracle = oracles(model_type)
    slots = len(oracle.adapters)
    engine = make_engine(
        oracle.directory, rows=slots + 5, kv_blocks=400, block_size=4, adapter_slots=slots, max_rank=256, step_tokens=48
    )
    check_batch(oracle, engine, run_until_idle, seed=3)


def test_weights_in_panels_and_fewer_slots_than_adapters_change_nothing(
    oracles: Callable[[str], PeftOracle], make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    """A slot that held rank 256 is given to rank 1, and so on."""
    oracle = oracles("llama")
    engine = make_engine(
        oracle.directory, rows=6, kv_blocks=400, block_size=4, adapter_slots=3, max_rank=256, step_tokens=32
    )
    check_batch(oracle, engine, run_until_idle, seed=4)


@pytest.mark.parametrize("model_type", CASES)
def test_every_adapter_changes_the_models_answer_and_every_tensor_is_consumed(
    model_type: str, oracles: Callable[[str], PeftOracle]
) -> None:
    oracle = oracles(model_type)
    layers = ModelLayers(load_model(str(oracle.directory)))
    prompt = tuple(range(3, 12))
    plain = oracle._logits(prompt, None)
    for name, directory in oracle.adapters.items():
        read = read_adapter(str(directory), layers, 256)
        header = read_header(directory / WEIGHTS_FILE)
        of_dora = sum(pair.rescale is not None for pair in read.pairs.values())
        assert of_dora == ("DoRA" in name) * len(read.pairs)
        assert 2 * len(read.pairs) + of_dora + len(base_copies(header)) == len(header), name
        changed = (oracle._logits(prompt, name) - plain).abs().max() / plain.abs().max()
        assert changed > 0.05, f"{name} changes the logits by {changed:.1e} only"


@pytest.mark.parametrize("model_type", TIED)
def test_adapters_of_both_ends_of_a_model_are_pefts(
    model_type: str, tmp_path: Path, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    """Also where only a few rows get logits: prompts in chunks, half of them without log probabilities."""
    ends = TIED[model_type]
    fan_in = {"fan_in_fan_out": True} if model_type == "gpt2" else {}
    kinds: dict[str, dict[str, Any]] = {
        f"the {number}": {"r": 4 + number, "lora_alpha": 9, "target_modules": [end]} for number, end in enumerate(ends)
    }
    kinds["all of them"] = {"r": 3, "lora_alpha": 5, "target_modules": ends}
    kinds["DoRA"] = {"r": 2, "lora_alpha": 3, "target_modules": ends, "use_dora": True}
    kinds = {name: kind | fan_in for name, kind in kinds.items()}
    oracle = PeftOracle(model_type, tmp_path, kinds, shape={"tie_word_embeddings": True, "head_dim": 16})
    engine = make_engine(oracle.directory, **MIXED)
    chance = random.Random(6)
    requests = {}
    for number, name in enumerate([*kinds, None] * 2):
        request = oracle.request(str(number), chance.choices(range(VOCAB), k=chance.choice([1, 7, 26])), 9, name)
        requests[name, number] = replace(request, prompt_logprobs=None) if number % 3 else request
    outputs = run_until_idle(engine, {0: list(requests.values())})
    answers = {oracle.check(one, outputs[one.sequence_id], name) for (name, _), one in requests.items()}
    # Tied, a tiny model is prone to repeat a token.
    assert len(answers) > len(kinds), f"answers are to be diverse: {answers}"


# An engine with more adapters than slots, and prompts in chunks.
MIXED = {"rows": 8, "kv_blocks": 100, "block_size": 4, "adapter_slots": 3, "max_rank": 8, "step_tokens": 12}


def requests_of_each(oracle: PeftOracle) -> dict[tuple[str | None, int], NewSequence]:
    """Two requests with each of the oracle's adapters and without one, by adapter and number."""
    chance = random.Random(6)
    return {
        (name, number): oracle.request(str(number), chance.choices(range(VOCAB), k=chance.choice([3, 7, 26])), 9, name)
        for number, name in enumerate([*oracle.adapters, None] * 2)
    }


@pytest.mark.parametrize(("model_type", "both_ends"), [("llama", True), *((one, False) for one in ("llama", *TIED))])
def test_trained_tokens_are_pefts(
    model_type: str,
    both_ends: bool,
    tmp_path: Path,
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
) -> None:
    """Rows of the embeddings, and of a head that shares their weight, in the place of the base's."""
    more = {"fan_in_fan_out": True} if model_type == "gpt2" else {}
    inner = ["attn.c_proj"] if model_type == "gpt2" else ["q_proj", "down_proj"]
    kinds: dict[str, dict[str, Any]] = {
        "a few": {"r": 3, "target_modules": inner, "trainable_token_indices": [7, 3, 11]},
        "one": {"r": 2, "target_modules": inner, "trainable_token_indices": [5]},
    }
    if both_ends:
        kinds["a few"]["trainable_token_indices"] = {"embed_tokens": [2, 9], "lm_head": [4, 9, 1]}
        kinds["one"]["trainable_token_indices"] = {"embed_tokens": [2], "lm_head": [8]}
    tied = {"tie_word_embeddings": model_type != "llama", "head_dim": 16}
    oracle = PeftOracle(model_type, tmp_path, {name: kind | more for name, kind in kinds.items()}, shape=tied)
    base = read_base_model(str(oracle.directory))
    assert {name: validate_adapter(path, base).rank for name, path in oracle.adapters.items()} == {"a few": 3, "one": 2}
    engine = make_engine(oracle.directory, **MIXED)
    requests = requests_of_each(oracle)
    outputs = run_until_idle(engine, {0: list(requests.values())})
    for (name, _), request in requests.items():
        oracle.check(request, outputs[request.sequence_id], name)


@pytest.mark.parametrize("model_type", ["llama", *TIED])
def test_embeddings_and_heads_that_were_trained_in_full_are_pefts(
    model_type: str, tmp_path: Path, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    """Each adapter has its own, and leaves a head that shares the embeddings' weight as it is."""
    more = {"fan_in_fan_out": True} if model_type == "gpt2" else {}
    kind = {"r": 2, "target_modules": ["attn.c_proj"] if model_type == "gpt2" else ["q_proj", "down_proj"]} | more
    embeddings = "wte" if model_type == "gpt2" else "embed_tokens"
    kinds: dict[str, dict[str, Any]] = {
        "first": kind | {"modules_to_save": [embeddings]},
        "second": kind | {"modules_to_save": ["lm_head"]},
        "third": kind | {"modules_to_save": [embeddings, "lm_head"]},
        "plain": kind,
    }
    tied = {"tie_word_embeddings": model_type != "llama", "head_dim": 16}
    oracle = PeftOracle(model_type, tmp_path, kinds, shape=tied)
    base = read_base_model(str(oracle.directory))
    assert {validate_adapter(path, base).rank for path in oracle.adapters.values()} == {2}
    engine = make_engine(oracle.directory, **MIXED)
    requests = requests_of_each(oracle)
    outputs = run_until_idle(engine, {0: list(requests.values())})
    answers = {oracle.check(request, outputs[request.sequence_id], name) for (name, _), request in requests.items()}
    assert len(answers) > len(kinds), f"answers are to be diverse: {answers}"
    for request in list(requests.values())[: len(kinds)]:
        alone = run_until_idle(engine, {0: [replace(request, sequence_id="alone")]})["alone"]
        beside = [one for output in outputs[request.sequence_id] for one in output.logprobs]
        assert [one for output in alone for one in output.logprobs] == beside, "bit by bit, whatever stands beside it"


def test_embeddings_and_heads_that_do_not_fit_are_refused_by_name(
    oracles: Callable[[str], PeftOracle], tmp_path: Path
) -> None:
    oracle, base = oracles("llama"), read_base_model(str(oracles("llama").directory))
    fields = json.loads((oracle.adapters["rank 8"] / CONFIG_FILE).read_text())
    tensors = load_file(oracle.adapters["rank 8"] / WEIGHTS_FILE)
    head, pair = "base_model.model.lm_head", {"lora_A.weight": torch.ones(2, 64), "lora_B.weight": torch.ones(VOCAB, 2)}
    own, loaded = {f"{head}.weight": torch.ones(VOCAB, 64)}, load_model(str(oracle.directory))
    for saved, more, words in [
        (["lm_head"], {}, "lacks the tensor base_model.model.lm_head.weight"),
        (
            ["lm_head"],
            {f"{head}.weight": torch.ones(VOCAB + 1, 64)},
            f"was trained with {VOCAB + 1} tokens, the base has",
        ),
        (["lm_head"], {f"{head}.weight": torch.ones(VOCAB, 65)}, f"has the shape .*{VOCAB}, 65"),
        (["lm_head"], own | {f"{head}.{part}": one for part, one in pair.items()}, "other trained tensors too"),
        (["lm_head"], own | {f"{head}.bias": torch.ones(VOCAB)}, "lm_head.bias is not a LoRA weight that is served"),
        (["wte"], own, "modules_to_save: the base has no wte"),
    ]:
        (tmp_path / CONFIG_FILE).write_text(json.dumps(fields | {"modules_to_save": saved}))
        save_file(tensors | more, tmp_path / WEIGHTS_FILE)
        with pytest.raises(ArtifactError, match=words):
            validate_adapter(tmp_path, base)
        with pytest.raises(ArtifactError, match=words):
            read_adapter(str(tmp_path), ModelLayers(loaded), 256)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(fields | {"modules_to_save": ["lm_head"]}))
    save_file(tensors | own, tmp_path / WEIGHTS_FILE)
    with pytest.raises(MismatchError, match=r"modules_to_save: the base has no lm_head .* on the CPU alone"):
        read_adapter(str(tmp_path), on_cuda(loaded), 256)


def test_trained_tokens_that_do_not_fit_are_refused_by_name(
    oracles: Callable[[str], PeftOracle], tmp_path: Path
) -> None:
    oracle, base = oracles("llama"), read_base_model(str(oracles("llama").directory))
    fields = json.loads((oracle.adapters["rank 8"] / CONFIG_FILE).read_text())
    tensors = load_file(oracle.adapters["rank 8"] / WEIGHTS_FILE)
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    loaded = load_model(str(oracle.directory))
    for ids, rows, words in [
        ([3, VOCAB], torch.ones(2, 64), f"{VOCAB} is not a token"),
        ([3], torch.ones(2, 64), "for 1 trained tokens"),
        ([], torch.ones(2, 64), "for 0 trained tokens"),
        ([3, 3], torch.ones(2, 64), "2 ids; 1 to 256 different"),
        ([3], None, "lacks the trained tokens of the embeddings"),
        ({"lm_head": [3]}, torch.ones(1, 64), "for 0 trained tokens"),
        ("all", torch.ones(2, 64), "not a list of token ids"),
    ]:
        (tmp_path / CONFIG_FILE).write_text(json.dumps(fields | {"trainable_token_indices": ids}))
        save_file(tensors | ({} if rows is None else {name: rows}), tmp_path / WEIGHTS_FILE)
        with pytest.raises(ArtifactError, match=words):
            validate_adapter(tmp_path, base)
        with pytest.raises(ArtifactError, match=words):
            read_adapter(str(tmp_path), ModelLayers(loaded), 256)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(fields | {"trainable_token_indices": [3]}))
    save_file(tensors | {name: torch.ones(1, 64)}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(MismatchError, match=r"trainable_token_indices: .* on the CPU alone"):
        read_adapter(str(tmp_path), on_cuda(loaded), 256)


@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_a_copy_of_the_models_own_weight_must_be_that(
    end: str, oracles: Callable[[str], PeftOracle], tmp_path: Path
) -> None:
    """Peft saves one beside an adapter of these, and puts it in the place of the model's."""
    oracle = oracles("llama")
    shutil.copy(oracle.adapters["both ends"] / CONFIG_FILE, tmp_path)
    tensors = load_file(oracle.adapters["both ends"] / WEIGHTS_FILE)
    (copy,) = (name for name in tensors if f"{end}.base_layer" in name)
    layers = ModelLayers(load_model(str(oracle.directory)))
    tensors[copy][3, 5] += 1
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(MismatchError, match=rf"{re.escape(copy)} is not the model's own"):
        read_adapter(str(tmp_path), layers, 8)
    for other, message in (
        (tensors[copy][:, 1:], rf"{re.escape(copy)} has not the shape of"),
        (tensors[copy][1:], f"trained with {VOCAB - 1} tokens, the base has {VOCAB}"),
    ):
        save_file(tensors | {copy: other.contiguous()}, tmp_path / WEIGHTS_FILE)
        with pytest.raises(MismatchError, match=message):
            read_adapter(str(tmp_path), layers, 8)
        with pytest.raises(MismatchError, match=message):
            validate_adapter(tmp_path, read_base_model(str(oracle.directory)))


def test_where_both_ends_can_not_be_adapted_they_are_refused_by_name(oracles: Callable[[str], PeftOracle]) -> None:
    oracle = oracles("llama")
    loaded = load_model(str(oracle.directory))
    for name, named in (("output", "lm_head"), ("input", "embed_tokens")):
        with pytest.raises(MismatchError, match=f"{named} .* on this device; .* on the CPU alone"):
            read_adapter(str(oracle.adapters[name]), on_cuda(loaded), 256)


# Saved by peft itself; what the refusal must name.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "biases of the base": ({"bias": "all"}, "bias"),
    "biases of B": ({"lora_bias": True}, "lora_bias"),
    "a trained layer": ({"modules_to_save": ["norm"]}, "modules_to_save"),
    "replicated layers": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    "parameters": ({"target_parameters": ["mlp.down_proj.weight"]}, "target_parameters"),
    "rank 257": ({"r": 257}, "257"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_served_is_refused_by_name_by_store_and_worker(
    kind: str, oracles: Callable[[str], PeftOracle], tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    oracle = oracles("llama")
    fields, named = REFUSED[kind]
    auto: Any = AutoModelForCausalLM
    arguments: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"]} | fields
    config = LoraConfig(task_type="CAUSAL_LM", **arguments)
    get_peft_model(auto.from_pretrained(oracle.directory), config).save_pretrained(str(tmp_path))
    with pytest.raises(ArtifactError, match=named) as by_store:
        validate_adapter(tmp_path, read_base_model(str(oracle.directory)))
    with pytest.raises(ArtifactError, match=named) as by_worker:
        read_adapter(str(tmp_path), ModelLayers(load_model(str(oracle.directory))), 256)
    if named in fields:  # a field of the configuration: both say the same
        assert by_store.value.subject == by_worker.value.subject == named


@pytest.mark.parametrize("suffix", ["lora_magnitude_vector", "lora_B.bias", "lora_embedding_A", "base_layer.weight"])
def test_a_tensor_that_nobody_consumes_is_named(
    suffix: str, oracles: Callable[[str], PeftOracle], tmp_path: Path
) -> None:
    oracle = oracles("llama")
    shutil.copy(oracle.adapters["rank 8"] / "adapter_config.json", tmp_path)
    stray = f"base_model.model.model.layers.0.self_attn.q_proj.{suffix}"
    tensors = load_file(oracle.adapters["rank 8"] / "adapter_model.safetensors")
    save_file(tensors | {stray: torch.ones(8, 8)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ArtifactError, match=re.escape(stray)):
        validate_adapter(tmp_path, read_base_model(str(oracle.directory)))
    with pytest.raises(ArtifactError, match=re.escape(stray)):
        read_adapter(str(tmp_path), ModelLayers(load_model(str(oracle.directory))), 256)
