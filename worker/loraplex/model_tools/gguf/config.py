"""The configuration of a GGUF file's model: as transformers reads it, with what it leaves out.

transformers takes some keys of an architecture and passes over the others without a word: heads and experts get the
sizes of another model, rope scaling, sliding windows and soft caps are off. Here each key is read by transformers, or
applied, or compared; a key that is none of these ends the import with its name.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from loraplex.contracts.artifacts import ArtifactError
from loraplex.model_tools.gguf.file import GgufFile

# Tensor of llama's rope scaling: the divisor of each frequency.
ROPE_FACTORS = "rope_freqs.weight"
# Fields of the configuration for keys that transformers passes over, by architecture, under GGUF's names. Each was
# compared with the model that llama.cpp's converter was given.
_FIELDS: dict[str, dict[str, str]] = {
    "llama": {"attention.key_length": "head_dim"},
    "qwen2": {},
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {"final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq"},
    "phi3": {
        "attention.sliding_window": "sliding_window",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
    "stablelm": {"rope.freq_base": "rope_theta", "use_parallel_residual": "use_parallel_residual"},
    "gpt2": {"context_length": "n_positions", "feed_forward_length": "n_inner"},
    "starcoder2": {"rope.freq_base": "rope_theta"},
    "nemotron": {"attention.key_length": "head_dim", "attention.layer_norm_epsilon": "norm_eps"},
}
ARCHITECTURES = tuple(_FIELDS)
# transformers' names of architectures, where they are others than GGUF's.
TRANSFORMERS_NAMES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
_NEEDED = ("block_count", "embedding_length", "attention.head_count")
# Keys that are compared with the configuration, or read with others of their kind.
_COMPARED = {"attention.value_length", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"}
_COMPARED |= {"rope.scaling.original_context_length", "attention.causal", "vocab_size"}
# Keys that change nothing: the order of the first converter's rows, and whether the model was tuned for its scaling.
_HARMLESS = {"tensor_data_layout", "rope.scaling.finetuned"}
# Architectures whose rotary embeddings may turn a part of each head.
_PARTLY_ROTARY = ("phi3", "stablelm", "nemotron")
# Layers of the models of 27B, whose queries are scaled by hidden size and heads; no key says so.
_WIDE_SCALE = {"gemma2": 46, "gemma3": 62}
# The scaling of Llama 3.1 and later, of which a file has the divisors of frequencies alone. The factor is the largest.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_config(file: GgufFile) -> PreTrainedConfig:
    """Return the configuration. Raises ArtifactError for a model that is not imported, naming what it is."""
    _check_kind(file)
    with tempfile.TemporaryDirectory(prefix="loraplex-gguf-") as folder:
        # Of the file itself transformers would make an array of every token.
        (Path(folder) / "model.gguf").write_bytes(file.skeleton())
        fields, _ = PreTrainedConfig.get_config_dict(folder, gguf_file="model.gguf")
    keys = _own_keys(file)
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        raise ArtifactError(file.name, "has no token embeddings (token_embd.weight), so that it is no language model")
    fields |= _changes(file, keys) | {"vocab_size": embeddings.shape[0]}
    config: PreTrainedConfig = AutoConfig.for_model(**fields)
    _compare(file, keys, config)
    return config


def _check_kind(file: GgufFile) -> None:
    architecture, kind = file.architecture, file.get("general.type", "model")
    if architecture == "clip" or kind == "mmproj":
        raise ArtifactError(file.name, "is a projector of images or sound (mmproj); give the language model's file")
    if kind == "adapter":
        raise ArtifactError(file.name, "is an adapter; push it with: loraplex adapters push")
    if kind != "model":
        raise ArtifactError(file.name, f"is a GGUF file of type {kind!r}, not a model")
    if architecture not in _FIELDS:
        raise ArtifactError(
            file.name,
            f"architecture {architecture!r} is not imported from GGUF, only {', '.join(_FIELDS)}; "
            "if it is a served family, use its transformers directory",
        )


def _own_keys(file: GgufFile) -> dict[str, Any]:
    """Return the values of the architecture's keys, by names without it. Raises ArtifactError for an unknown one."""
    prefix = f"{file.architecture}."
    keys = {key.removeprefix(prefix): entry.value for key, entry in file.entries.items() if key.startswith(prefix)}
    read = {name for name, field in _mapping(file).items() if field is not None}
    if missing := [name for name in _NEEDED if name not in keys]:
        raise ArtifactError(file.name, f"lacks {prefix}{missing[0]}")
    if keys["block_count"] > len(file.tensors):
        raise ArtifactError(file.name, f"has {keys['block_count']} layers and {len(file.tensors)} tensors")
    known = read | set(_FIELDS[file.architecture]) | _COMPARED | _HARMLESS
    # A zero turns something off, such as a number of experts.
    if unknown := sorted(key for key in set(keys) - known if keys[key]):
        value = str(keys[unknown[0]])[:80]
        raise ArtifactError(file.name, f"{prefix}{unknown[0]} is {value}, which has no effect in transformers' model")
    return keys


def _mapping(file: GgufFile) -> dict[str, str | None]:
    name = TRANSFORMERS_NAMES.get(file.architecture, file.architecture)
    mapping: Any = GGUF_CONFIG_MAPPING[name]
    return dict(mapping)


def _changes(file: GgufFile, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration's fields that transformers leaves out. Raises ArtifactError."""
    architecture = file.architecture
    changes = {field: keys[key] for key, field in _FIELDS[architecture].items() if key in keys}
    if scaling := _rope_scaling(file, keys):
        changes["rope_scaling"] = scaling
    hidden, heads = keys["embedding_length"], keys["attention.head_count"]
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        raise ArtifactError(
            file.name, f"{architecture}.attention.head_count is {heads}, and layers have one number each"
        )
    head_dim = keys.get("attention.key_length", hidden // heads)
    if architecture in _PARTLY_ROTARY and "rope.dimension_count" in keys:
        changes["partial_rotary_factor"] = keys["rope.dimension_count"] / head_dim
    if architecture in _WIDE_SCALE:
        wide = keys["block_count"] == _WIDE_SCALE[architecture]
        changes["query_pre_attn_scalar"] = hidden // heads if wide else head_dim
    return changes


def _rope_scaling(file: GgufFile, keys: dict[str, Any]) -> dict[str, Any]:
    """Return what rope scaling the keys and the tensor of divisors say. Raises ArtifactError for another kind."""
    kind = keys.get("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file)
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ArtifactError(file.name, f"rope scaling {kind!r} is not served; use a version with a shorter context")
    names = {"factor": "rope.scaling.factor"}
    if kind == "yarn":
        names["original_max_position_embeddings"] = "rope.scaling.original_context_length"
    if missing := [key for key in names.values() if key not in keys]:
        raise ArtifactError(file.name, f"has rope scaling {kind!r} and lacks {file.architecture}.{missing[0]}")
    return {name: keys[key] for name, key in names.items()} | {"rope_type": kind}


def _llama3_scaling(file: GgufFile) -> dict[str, Any]:
    """Return Llama 3's scaling whose divisors the file has. Raises ArtifactError for others."""
    divisors = file.tensors[ROPE_FACTORS].read()
    theta, factor = float(file.get(f"{file.architecture}.rope.freq_base", 10_000.0)), float(divisors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    low, high, context = _LLAMA3.values()
    # The formula of transformers' _compute_llama3_parameters.
    smooth = np.clip((context / wavelengths - low) / (high - low), 0, 1)
    if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-5):
        raise ArtifactError(file.name, f"{ROPE_FACTORS} is not the rope scaling of Llama 3, the only one that is known")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _compare(file: GgufFile, keys: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise ArtifactError for a key that the configuration has no field for, and whose value is not what it does."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary = int(head_dim * (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0))
    expected = {"attention.value_length": head_dim, "rope.dimension_count": rotary, "attention.causal": True}
    for key, value in expected.items():
        if keys.get(key, value) != value:
            raise ArtifactError(
                file.name, f"{file.architecture}.{key} is {keys[key]}, and transformers' model has {value}"
            )


def named_tensors(config: PreTrainedConfig, architecture: str, **options: Any) -> tuple[Any, Any, dict[str, str]]:
    """Return a model without numbers, transformers' processor of GGUF's tensors, and its tensors' names by GGUF's.

    The names of experts' tensors lack the last part, `.weight`.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, **options)  # type: ignore[no-untyped-call]
    kind: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor = kind(config.to_dict())
    # Without children: transformers looks at each module's names as well, 10 s that find nothing more.
    flat: Any = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=tuple)
    return model, processor, get_gguf_hf_weights_map(flat, processor, model_type=architecture)
