from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import ModuleShape, read_base_model


def test_the_manifest_of_a_directory(model_directory: Path) -> None:
    base = read_base_model(str(model_directory))
    assert (base.name, base.architecture, base.context_length, base.vocab_size) == ("tiny-llama", "llama", 64, 32)
    assert base.end_token_ids == (2,)
    assert base.modules == (
        ModuleShape("lm_head", in_features=8, out_features=32),
        ModuleShape("model.embed_tokens", in_features=32, out_features=8),
        ModuleShape("model.layers.0.self_attn.k_proj", in_features=8, out_features=4),
        ModuleShape("model.layers.0.self_attn.q_proj", in_features=8, out_features=8),
    )
    assert set(base.files) == {"config.json", "tokenizer.json"}
    assert base.files["tokenizer.json"] == b"{}"
    assert read_base_model(str(model_directory), name="other").name == "other"


@pytest.mark.parametrize(
    ("generation", "expected"), [({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": None}, ()), ({}, (2,))]
)
def test_the_generation_config_decides_the_end_tokens(
    model_directory: Path, generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    (model_directory / "generation_config.json").write_text(json.dumps(generation))
    assert read_base_model(str(model_directory)).end_token_ids == expected


def test_the_digest_depends_on_config_and_weights_alone(
    model_directory: Path, tensors: dict[str, np.ndarray[Any, Any]], change_json: Callable[..., None]
) -> None:
    digest = read_base_model(str(model_directory)).digest
    (model_directory / "tokenizer.json").write_text('{"a": 1}')
    assert read_base_model(str(model_directory), name="other").digest == digest
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, model_directory / "model.safetensors")
    changed = read_base_model(str(model_directory)).digest
    change_json(model_directory / "config.json", rope_theta=5.0)
    assert len({digest, changed, read_base_model(str(model_directory)).digest}) == 3


def test_a_sharded_checkpoint_is_the_same_model(
    model_directory: Path, tensors: dict[str, np.ndarray[Any, Any]]
) -> None:
    single = read_base_model(str(model_directory))
    shard(model_directory, tensors)
    sharded = read_base_model(str(model_directory))
    assert (sharded.digest, sharded.modules) == (single.digest, single.modules)


def shard(directory: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    """Cut the checkpoint in two files; the index."""
    (directory / "model.safetensors").unlink()
    placed = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for file in set(placed.values()):
        save_file({name: tensors[name] for name in placed if placed[name] == file}, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return index


def test_bad_indexes_are_refused(model_directory: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    index = shard(model_directory, tensors)
    good = json.loads(index.read_text())["weight_map"]
    for weight_map, message in [
        ([], "weight_map is not"),
        (good | {"x": "../model-0.safetensors"}, "weight_map is not"),
        (good | {"x": "model-0.safetensors"}, r"model-0.safetensors: lacks tensor x"),
        (good | {"x": "model-9.safetensors"}, "model-9.safetensors: cannot be read"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ArtifactError, match=message):
            read_base_model(str(model_directory))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bloom"}, "config.json: model_type 'bloom' is not supported, only apertus, "),
        ({"model_type": None}, "model_type None is not supported"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method: None is not read"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None"),
        ({"vocab_size": "32"}, "vocab_size is '32'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is not a token id"),
    ],
)
def test_configs_that_are_not_served(
    model_directory: Path, change_json: Callable[..., None], changes: dict[str, Any], message: str
) -> None:
    change_json(model_directory / "config.json", **changes)
    with pytest.raises(ArtifactError, match=message):
        read_base_model(str(model_directory))


def test_directories_that_are_none(tmp_path: Path, model_directory: Path) -> None:
    with pytest.raises(ArtifactError, match=r"model: .*/missing is not a directory"):
        read_base_model(str(tmp_path / "missing"))
    with pytest.raises(ArtifactError, match=r"has no config\.json"):
        read_base_model(str(tmp_path))
    (model_directory / "model.safetensors").rename(model_directory / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match="only safetensors weights are served"):
        read_base_model(str(model_directory))


def test_a_checkpoint_without_layers_is_refused(model_directory: Path) -> None:
    save_file({"model.norm.weight": np.zeros(8, np.float32)}, model_directory / "model.safetensors")
    with pytest.raises(ArtifactError, match="has no linear layers that adapters could change"):
        read_base_model(str(model_directory))


def modules_of(
    directory: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, int]]:
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, directory / "model.safetensors")
    return {one.name: (one.in_features, one.out_features) for one in read_base_model(str(directory)).modules}


GPT2 = {"model_type": "gpt2", "n_positions": 64, "vocab_size": 32, "n_layer": 1}


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_stores_its_weights_turned_and_some_checkpoints_lack_the_prefix(tmp_path: Path, prefix: str) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (32, 8),
        "wpe.weight": (64, 8),
        "h.0.attn.c_attn.weight": (8, 24),
        "ln_f.weight": (8,),
    }
    found = modules_of(tmp_path, GPT2, {prefix + name: shape for name, shape in shapes.items()})
    # The head uses the weight of the embeddings.
    assert found == {"transformer.h.0.attn.c_attn": (8, 24), "transformer.wte": (32, 8), "lm_head": (8, 32)}
    assert read_base_model(str(tmp_path)).context_length == 64


def test_experts_are_two_modules_and_routers_and_layers_that_transformers_leaves_are_none(tmp_path: Path) -> None:
    config = {
        "model_type": "deepseek_v3",
        "max_position_embeddings": 64,
        "vocab_size": 32,
        "num_hidden_layers": 1,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.layers.0.mlp.experts.3.up_proj.weight": (4, 8),
        "model.layers.0.mlp.gate.weight": (4, 8),
        "model.layers.0.mlp.shared_experts.up_proj.weight": (6, 8),
        "model.layers.0.self_attn.q_norm.weight": (2, 4),
        "model.layers.1.eh_proj.weight": (8, 16),
        "model.mtp_block.0.mlp.up_proj.weight": (8, 16),
    }
    assert modules_of(tmp_path, config, shapes) == {
        "model.layers.0.mlp.experts.gate_up_proj": (8, 4),
        "model.layers.0.mlp.shared_experts.up_proj": (8, 6),
    }
