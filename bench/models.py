"""The models of the benchmarks: their shapes, and files of random weights and adapters in these shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils.logging import disable_progress_bar

from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE

# The modules that adapters change in benchmarks: all linear layers of a decoder layer.
ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen2": Qwen2Config, "llama": LlamaConfig, "qwen3": Qwen3Config, "gemma3_text": Gemma3TextConfig,
    "olmo2": Olmo2Config,
}  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated MLPs, like Llama and Qwen2. `family` is one of _CONFIGS; `tied`: tied embeddings."""

    name: str
    family: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    tied: bool = True

    @property
    def head_dim(self) -> int:
        """Return the number of features of an attention head."""
        return self.hidden // self.heads

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (in_features, out_features) of a layer's linear layers, by the last part of their names."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, self.mlp),
            "up_proj": (self.hidden, self.mlp),
            "down_proj": (self.mlp, self.hidden),
        }

    @property
    def linear_parameters(self) -> int:
        """Return the number of weights of all linear layers, without the output head."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linear_shapes.values())

    @property
    def head_parameters(self) -> int:
        """Return the number of weights of the output head, which the embeddings have as well."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Return the number of weights of all layers, the head and the embeddings, without norms."""
        return self.linear_parameters + self.head_parameters * (1 if self.tied else 2)

    def adapter_parameters(self, rank: float, linears: Collection[str] = ALL_LINEARS) -> float:
        """Return the number of weights of an adapter on these linear layers; the mean number for a mean rank."""
        return self.layers * rank * sum(sum(self.linear_shapes[linear]) for linear in linears)

    def config(self) -> PreTrainedConfig:
        """Return the transformers config. It has no end token, so that every answer has the requested length."""
        return _CONFIGS[self.family](
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )


QWEN2_04B = ModelShape("qwen2-0.4b", "qwen2", 24, 896, 4864, 14, 2, 32_000, 32_768)
LLAMA_28M = ModelShape("llama-28m", "llama", 8, 512, 1408, 8, 4, 8_192, 8_192)
# For --quick: four layers as wide as those of qwen2-0.4b.
QWEN2_QUICK = ModelShape("qwen2-quick", "qwen2", 4, 896, 4864, 14, 2, 32_000, 32_768)
# For CUDA: the real shape, and for --quick fewer of its layers.
LLAMA3_8B = ModelShape("llama3-8b", "llama", 32, 4096, 14_336, 32, 8, 128_256, 8_192, tied=False)
LLAMA3_QUICK = ModelShape("llama3-quick", "llama", 4, 4096, 14_336, 32, 8, 32_000, 8_192, tied=False)
TINY = ModelShape("tiny", "qwen2", 2, 64, 128, 4, 2, 512, 8_192)


def save_model(shape: ModelShape, directory: Path, seed: int = 0, device: str = "cpu") -> Path:
    """Write a transformers directory in bfloat16 with weights drawn on the device; return the directory."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    return directory


def save_adapter(
    shape: ModelShape, rank: int, directory: Path, seed: int, linears: Collection[str] = ALL_LINEARS
) -> Path:
    """Write an adapter on these linear layers in peft's layout, in bfloat16, B not zero; return the directory."""
    directory.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": shape.name,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(linears),
        "bias": "none",
        "inference_mode": True,
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True))
    generator = torch.Generator().manual_seed(seed)
    save_file(dict(_adapter_tensors(shape, rank, generator, linears)), directory / WEIGHTS_FILE)
    return directory


def _adapter_tensors(
    shape: ModelShape, rank: int, generator: torch.Generator, linears: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for layer in range(shape.layers):
        for linear in linears:
            inputs, outputs = shape.linear_shapes[linear]
            part = "mlp" if linear in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{part}.{linear}"
            for side, size in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                weight = torch.randn(size, generator=generator) * 0.02
                yield f"{name}.{side}.weight", weight.bfloat16()
