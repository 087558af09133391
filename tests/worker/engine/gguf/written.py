"""GGUF files of tiny models and adapters, written by the rules of llama.cpp's converters (convert_hf_to_gguf.py and
convert_lora_to_gguf.py): names, keys, and what they change in tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.worker.engine.model.tiny_families import make_config, make_model

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = ("h e", "l l", "he ll", "Ġ t")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_BYTES: Any = bytes_to_unicode
TOKENS = (*_BYTES().values(), *(merge.replace(" ", "") for merge in MERGES), *SPECIAL)
END = TOKENS.index("<|im_end|>")
# transformers' names of families by GGUF's of architectures, where these are others.
FAMILIES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
# What a GGUF file can say, where the tiny families' own fields are others: a window of each architecture's layers, tied
# embeddings of Gemma, sizes of whole blocks.
SIZES: dict[str, Any] = {"vocab_size": len(TOKENS), "intermediate_size": 64, "sliding_window": None}
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"tie_word_embeddings": True, "sliding_window": 6},
    "gemma3": {"tie_word_embeddings": True, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2},
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
    "phi3": {"sliding_window": 6},
    "qwen2": {"layer_types": ["full_attention"] * 2, "use_sliding_window": False},
    "qwen2moe": {"layer_types": ["full_attention"] * 2, "use_sliding_window": False},
    "qwen3": {"layer_types": ["full_attention"] * 2, "use_sliding_window": False, "rope_parameters": YARN},
    "qwen3moe": {"use_sliding_window": False, "norm_topk_prob": True},
    "stablelm": {"qk_layernorm": False},
}
Array = NDArray[Any]


def make_source(architecture: str, directory: Path, **fields: Any) -> Any:
    """Save a tiny model of an architecture that a GGUF file can describe, and return it."""
    family = FAMILIES.get(architecture, architecture)
    known = make_config(family).to_dict()
    changes = {name: value for name, value in SIZES.items() if name in known} | OWN.get(architecture, {}) | fields
    if not known.get("head_dim"):
        known.pop("head_dim", None)
    return make_model(AutoConfig.for_model(**known | changes), directory)


def write_model(
    model: Any,
    path: Path,
    architecture: str,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    keys: Mapping[str, Any] = MappingProxyType({}),
    tensors: Mapping[str, Array] = MappingProxyType({}),
) -> Path:
    """Write a model's GGUF file: matrices in a type of ggml, vectors in float32.

    `keys` and `tensors` are more of them, or others; a key of None is left out.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_type("model")
    for key, value in (_keys(model.config, architecture) | dict(keys)).items():
        _add(writer, key, value)
    if keys.get("tokenizer.ggml.tokens", TOKENS):
        _add_tokenizer(writer)
    for name, values in (tensors_of(model, architecture) | dict(tensors)).items():
        add_tensor(writer, name, values, kind)
    finish(writer)
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    full = key if key.startswith(("general.", "tokenizer.", "adapter.")) else f"{writer.arch}.{key}"
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
    }  # fmt: skip
    if value is not None:
        add[type(value)](full, value)


def _add_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(TOKENS.index("<|im_start|>"))
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(TOKENS.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_tensor(writer: GGUFWriter, name: str, values: Array, kind: GGMLQuantizationType) -> None:
    """Add a tensor: a matrix in a type of ggml, where its rows are whole blocks; of integers as it is."""
    if values.dtype == np.int8:
        writer.add_tensor(name, values)
        return
    if values.ndim < 2 or kind is GGMLQuantizationType.F32 or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    else:
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values, np.float32), kind), raw_dtype=kind)


def finish(writer: GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _keys(config: Any, architecture: str) -> dict[str, Any]:
    """Return the keys of an architecture, without its name."""
    values = config.to_dict()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = values.get("rope_parameters") or {}
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": values.get("intermediate_size") or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": values.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": values.get("rms_norm_eps"),
        "rope.freq_base": rope.get("full_attention", rope).get("rope_theta"),
        "vocab_size": config.vocab_size,
    }
    if epsilon := values.get("layer_norm_eps") or values.get("layer_norm_epsilon") or values.get("norm_epsilon"):
        keys["attention.layer_norm_epsilon"] = epsilon
    if values.get("head_dim"):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        keys["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    return keys | _own_keys(config, values, architecture, head_dim)


def _own_keys(config: Any, values: Mapping[str, Any], architecture: str, head_dim: int) -> dict[str, Any]:
    partly = int(head_dim * ((values.get("rope_parameters") or {}).get("partial_rotary_factor") or 1))
    own: dict[str, dict[str, Any]] = {
        "llama": {"rope.dimension_count": head_dim},
        "qwen2moe": {
            "expert_count": getattr(config, "num_experts", None),
            "expert_used_count": getattr(config, "num_experts_per_tok", None),
            "expert_feed_forward_length": values.get("moe_intermediate_size"),
            "expert_shared_feed_forward_length": values.get("shared_expert_intermediate_size"),
        },
        "gemma2": {
            "attn_logit_softcapping": values.get("attn_logit_softcapping"),
            "final_logit_softcapping": values.get("final_logit_softcapping"),
            "attention.sliding_window": values.get("sliding_window"),
            "rope.freq_base": None,
        },
        "gemma3": {"rope.freq_base_swa": 1e4, "attention.sliding_window": values.get("sliding_window")},
        "phi3": {
            "rope.dimension_count": head_dim,
            "rope.scaling.original_context_length": values.get("original_max_position_embeddings"),
            "attention.sliding_window": values.get("sliding_window"),
        },
        "stablelm": {"rope.dimension_count": partly, "use_parallel_residual": values.get("use_parallel_residual")},
        "gpt2": {"vocab_size": None},
        "starcoder2": {"vocab_size": None},
        "nemotron": {
            "rope.dimension_count": partly,
            "rope.scaling.type": "none",
            "attention.layer_norm_epsilon": values.get("norm_eps"),
        },
    }
    own["qwen3moe"] = own["qwen2moe"] | {"expert_shared_feed_forward_length": None}
    return own.get(architecture, {})


def _names(model: Any, architecture: str) -> Any:
    """Return the table of an architecture's names in GGUF."""
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, model.config.num_hidden_layers)


def tensors_of(model: Any, architecture: str) -> dict[str, Array]:
    """Return a model's tensors as GGUF has them."""
    table = _names(model, architecture)
    tensors: dict[str, Array] = {}
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    for full, tensor in model.state_dict().items():
        values = tensor.numpy()
        if full in tied:
            continue
        if full.endswith("gate_up_proj"):  # of experts
            block = full.split(".")[2]
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                tensors[f"blk.{block}.ffn_{part}_exps.weight"] = half
            continue
        name, dot, suffix = full.rpartition(".")
        if suffix not in ("weight", "bias"):
            name, dot, suffix = full, ".", "weight"
        new = table.get_name(name)
        assert new is not None, full
        tensors[new + dot + suffix] = converted(new + dot + suffix, values, model.config, architecture)
    return tensors


def converted(name: str, values: Array, config: Any, architecture: str) -> Array:
    """Return a tensor as the architecture's converter changes it, by its name in GGUF."""
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    if architecture in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return values + np.float32(1)
    if architecture == "gpt2" and name.endswith(("qkv.weight", "attn_output.weight", "up.weight", "down.weight")):
        return values.T
    return values


def write_adapter(
    directory: Path, path: Path, model: Any, architecture: str, kind: GGMLQuantizationType = GGMLQuantizationType.F32
) -> Path:
    """Write the GGUF file of a peft adapter of a model."""
    config = json.loads((directory / "adapter_config.json").read_text())
    table = _names(model, architecture)
    writer = GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", config["lora_alpha"])
    if invocation := config["alora_invocation_tokens"]:
        writer.add_array("adapter.alora.invocation_tokens", invocation)
    for full, values in load_file(directory / "adapter_model.safetensors").items():
        module, _, part = full.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        name = f"{table.get_name(module)}.weight"
        if part == "embedding_A":
            changed = values.T
        else:
            changed = converted(name, values, model.config, architecture) if part.endswith("B") else values
        add_tensor(writer, f"{name}.lora_{part[-1].lower()}", changed, kind)
    finish(writer)
    return path


def logits(model: Any) -> torch.Tensor:
    """Return a model's logits after a prompt that is longer than any window."""
    ids = torch.tensor([[5, 7, 9, 100, 33, 21, 7, 250, 14, 90, 31, 11, 60]])
    with torch.inference_mode():
        result: torch.Tensor = model(ids, use_cache=False).logits
    return result
