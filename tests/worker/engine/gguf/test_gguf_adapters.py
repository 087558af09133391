"""LoRA adapters in GGUF: what llama.cpp's converter makes of a peft adapter becomes the same adapter again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from loraplex.contracts.artifacts import ArtifactError
from loraplex.model_tools.gguf import convert_adapter
from loraplex.model_tools.gguf.config import ARCHITECTURES
from tests.worker.engine.gguf.written import add_tensor, finish, logits, make_source, write_adapter

auto: Any = AutoModelForCausalLM
CONVERTED = sorted(set(ARCHITECTURES) - {"gpt2"})
# Experts' modules and routers are other tensors than linear layers.
ATTENTION = {"qwen2moe": ["q_proj", "k_proj", "v_proj", "o_proj"], "qwen3moe": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def make_adapter(directory: Path, base: Path, **fields: Any) -> Path:
    torch.manual_seed(3)
    defaults: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "init_lora_weights": False}
    config = LoraConfig(**defaults | fields, task_type="CAUSAL_LM")
    peft: Any = get_peft_model(auto.from_pretrained(base), config)
    peft.save_pretrained(directory, save_embedding_layers=False)
    return directory


def convert(file: Path, base: Path, out: Path) -> dict[str, Any]:
    """Convert an adapter; return its configuration."""
    out.mkdir()
    convert_adapter(file, base, out)
    config: dict[str, Any] = json.loads((out / "adapter_config.json").read_text())
    return config


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(directory / "adapter_model.safetensors")
    return loaded


def assert_equal(directory: Path, other: Path) -> None:
    """Assert that two adapters have the same tensors."""
    before, after = tensors(directory), tensors(other)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("architecture", CONVERTED)
def test_an_adapter_comes_back(architecture: str, tmp_path: Path) -> None:
    model = make_source(architecture, tmp_path / "base")
    modules = ATTENTION.get(architecture, "all-linear")
    adapter = make_adapter(tmp_path / "adapter", tmp_path / "base", target_modules=modules)
    file = write_adapter(adapter, tmp_path / "adapter.gguf", model, architecture)
    config = convert(file, tmp_path / "base", tmp_path / "converted")
    assert_equal(adapter, tmp_path / "converted")
    given = json.loads((adapter / "adapter_config.json").read_text())
    assert {name: config[name] for name in ("r", "lora_alpha")} == {"r": 4, "lora_alpha": 12}
    assert set(config["target_modules"]) == {name.rpartition(".")[2] for name in given["target_modules"]}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny model and its directory."""
    base = tmp_path_factory.mktemp("llama")
    return make_source("llama", base), base


def test_ranks_and_embeddings_come_back_and_answers_are_equal(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, base = llama
    fields = {"target_modules": ["embed_tokens", "q_proj", "up_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 8}}
    adapter = make_adapter(tmp_path / "adapter", base, **fields)
    file = write_adapter(adapter, tmp_path / "adapter.gguf", model, "llama")
    config = convert(file, base, tmp_path / "converted")
    assert_equal(adapter, tmp_path / "converted")
    assert config["rank_pattern"] == {"model.layers.1.self_attn.q_proj": 8}
    before, after = (
        logits(PeftModel.from_pretrained(auto.from_pretrained(base), where))
        for where in (adapter, tmp_path / "converted")
    )
    assert torch.equal(before, after)
    assert not torch.allclose(before, logits(model), atol=1e-3)


def test_an_invocation_comes_back(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, base = llama
    adapter = make_adapter(tmp_path / "adapter", base, alora_invocation_tokens=[7, 5])
    file = write_adapter(adapter, tmp_path / "adapter.gguf", model, "llama")
    assert convert(file, base, tmp_path / "converted")["alora_invocation_tokens"] == [7, 5]


def test_16_bits_stay_16_bits(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, base = llama
    adapter = make_adapter(tmp_path / "adapter", base)
    file = write_adapter(adapter, tmp_path / "adapter.gguf", model, "llama", GGMLQuantizationType.F16)
    convert(file, base, tmp_path / "converted")
    before, after = tensors(adapter), tensors(tmp_path / "converted")
    assert all(torch.equal(before[name].half(), after[name]) for name in before)


def write(path: Path, keys: dict[str, Any], arrays: dict[str, tuple[int, ...]], architecture: str = "llama") -> Path:
    """Write a GGUF file of zeros."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    for key, value in keys.items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    for name, shape in arrays.items():
        add_tensor(writer, name, np.zeros(shape, np.float32), GGMLQuantizationType.F32)
    finish(writer)
    return path


LORA = {"adapter.type": "lora", "adapter.lora.alpha": 8.0}
A, B = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"


@pytest.mark.parametrize(
    ("keys", "arrays", "sentence"),
    [
        ({"adapter.type": "control"}, {}, r"is an adapter of type 'control', and only lora is served$"),
        (LORA, {}, r"has no tensors$"),
        (LORA, {A: (4, 32)}, r"has only one of blk\.0\.attn_q\.weight\.lora_a and \.lora_b$"),
        (LORA, {A: (4, 16), B: (32, 4)}, r"A is \[4, 16\] and B is \[32, 4\], and the base's weight \[32, 32\]$"),
        (
            LORA,
            {A: (4, 32), B: (32, 4), "output_norm.weight": (32,)},
            r"has output_norm\.weight, a tensor in full; only",
        ),
        (
            LORA,
            {f"blk.9.{A[6:]}": (4, 32), f"blk.9.{B[6:]}": (32, 4)},
            r"adapts blk\.9\.attn_q\.weight, which .* has not",
        ),
        (
            {"adapter.type": "lora"},
            {A: (4, 32), B: (32, 4)},
            r"lacks adapter\.lora\.alpha, without which nobody knows its",
        ),
    ],
)
def test_other_adapters_are_refused_by_their_names(
    llama: tuple[Any, Path], tmp_path: Path, keys: dict[str, Any], arrays: dict[str, tuple[int, ...]], sentence: str
) -> None:
    file = write(tmp_path / "adapter.gguf", keys, arrays)
    with pytest.raises(ArtifactError, match=sentence):
        convert_adapter(file, llama[1], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter.gguf"]


@pytest.mark.parametrize("architecture", ["gpt2", "mamba", "qwen2"])
def test_another_architecture_is_refused(llama: tuple[Any, Path], tmp_path: Path, architecture: str) -> None:
    file = write(tmp_path / "adapter.gguf", LORA, {A: (4, 32), B: (32, 4)}, architecture)
    sentence = "is 'llama'$" if architecture == "qwen2" else "push the peft directory that it was made of$"
    with pytest.raises(ArtifactError, match=rf"is an adapter of architecture '{architecture}', and .*{sentence}"):
        convert_adapter(file, llama[1], tmp_path)
