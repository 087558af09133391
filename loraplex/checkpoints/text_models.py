"""Reads the text model of a checkpoint that wraps it beside a tower for images or sound.

    config.json    architectures [Gemma3ForConditionalGeneration], text_config {...}, vision_config {...}
    weights        language_model.model.layers.0...   model.language_model.layers.0...   model.text_model.layers.0...
                   visual.blocks.0...   vision_tower...   multi_modal_projector...

The text model gets the config of its own family and the names that this family's checkpoints have; all other tensors
stay in their files, and no byte of them is read. Positions with a number each for time, height and width (M-RoPE, arXiv
2409.12191) are the usual ones where there is no image, so these families compute texts as the plain ones do.
tests/worker/engine/model/test_towers.py compares each wrapper with transformers' own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.artifacts.checkpoint import (
    CONFIG_FILE,
    TOWER_FIELD,
    Checkpoint,
    TensorInfo,
    read_checkpoint,
    read_small_file,
)
from loraplex.contracts.artifacts.families import FAMILIES, HEAD, config_count

# The wrappers that are served, by model_type: their titles.
WRAPPERS = {
    "deepseek_vl": "DeepSeek-VL",
    "exaone4_5": "EXAONE 4.5",
    "gemma3": "Gemma 3",
    "glm46v": "GLM-4.6V Flash",
    "glm4v": "GLM-4.1V",
    "glm4v_moe": "GLM-4.5V, 4.6V",
    "got_ocr2": "GOT-OCR 2",
    "idefics2": "Idefics 2",
    "idefics3": "Idefics 3",
    "internvl": "InternVL 3",
    "janus": "Janus",
    "lighton_ocr": "LightOnOCR",
    "llava": "LLaVA 1.5, Pixtral",
    "llava_next": "LLaVA-NeXT",
    "llava_next_video": "LLaVA-NeXT-Video",
    "llava_onevision": "LLaVA-OneVision",
    "mistral3": "Mistral Small 3.1, 3.2, Ministral 3",
    "qwen2_5_vl": "Qwen 2.5 VL",
    "qwen2_audio": "Qwen 2 Audio",
    "qwen2_vl": "Qwen 2 VL",
    "qwen3_vl": "Qwen 3 VL",
    "smolvlm": "SmolVLM",
    "video_llama_3": "VideoLLaMA 3",
    "video_llava": "Video-LLaVA",
    "vipllava": "ViP-LLaVA",
    "voxtral": "Voxtral",
}
# Text models that a wrapper may have: the family that computes each.
TEXT_FAMILIES = {
    **{name: name for name in (
        "deepseek_v3", "exaone4", "gemma3_text", "llama", "ministral3", "mistral", "qwen2", "qwen3",
    )},
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}  # fmt: skip

_STATE = "it keeps a recurrent state, which this engine does not support"
_SHARED = "its layers share keys and values, or differ in their size"
_MASK = "its window or chunks are in the attention mask alone, which this engine does not build"
_SCALE = "transformers' wrapper leaves the scale of its logits out, so it is not clear what it should answer"
# Why each was refused that was tried; others were not tried. First the decoders that wrap nothing, by their classes.
_REASONS = {
    "it has its own attention code, which transformers cannot replace": (
        "Bloom", "CodeGen", "Falcon", "GPTJ", "GPTNeo", "GPTNeoXJapanese", "Mpt", "XGLM",
    ),
    "it attends twice in a layer": ("DiffLlama",),
    _STATE: (
        "FalconH1", "FalconMamba", "GraniteMoeHybrid", "Jamba", "Lfm2", "Mamba2", "Mamba", "MiniMax", "Qwen3Next",
        "Qwen3_5", "Qwen3_5Moe",
    ),
    _SHARED: ("Gemma3n", "Gemma4"),
    _MASK: ("Llama4", "Phimoe"),
}  # fmt: skip
WHY_REFUSED = {f"{name}ForCausalLM": why for why, names in _REASONS.items() for name in names}
# Then wrappers, by the model_type of the whole or of the text model.
_REASONS_OF_WRAPPERS = {
    _STATE: ("qwen3_5_text", "qwen3_5_moe_text", "lfm2", "nemotron_h"),
    _SHARED: ("gemma3n_text", "gemma4_text"),
    _MASK: ("llama4_text",),
    "it attends to the image in layers of its own": ("mllama_text_model",),
    "its experts' weights are stored the other way round than its family's": ("qwen3_vl_moe_text",),
    "it reads a prompt in both directions": ("paligemma",),
    _SCALE: ("aya_vision", "cohere2_vision", "granite"),
}
WRAPPERS_REFUSED = {name: why for why, names in _REASONS_OF_WRAPPERS.items() for name in names}
# What transformers' classes fill in where a text_config leaves it out, and our readers or the family's class do not.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "hidden_size": 2304, "vocab_size": 262208, "max_position_embeddings": 131072,
    },
    "glm4v_text": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
    "glm4v_moe_text": {"max_position_embeddings": 65536, "vocab_size": 151424, "attention_bias": True},
    "llama": {
        "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
        "vocab_size": 32000, "max_position_embeddings": 131072,
    },
    "qwen2": {
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 4096,
        "vocab_size": 151936, "max_position_embeddings": 32768,
    },
    "qwen2_5_vl_text": {"num_key_value_heads": 8, "vocab_size": 152064, "rms_norm_eps": 1e-5},
    "qwen2_vl_text": {"num_key_value_heads": 8, "vocab_size": 152064, "rms_norm_eps": 1e-5},
    "qwen3_vl_text": {"max_position_embeddings": 128000, "head_dim": 128},
}  # fmt: skip
# The base of rotary positions where a text_config of these leaves it out.
ROPE_THETA = {"qwen2_5_vl_text": 1e6, "qwen2_vl_text": 1e6, "qwen3_vl_text": 5e5}
# Fields that a text model's class sets without its config.
_FIXED = {"glm4v_text": {"attention_bias": True}}
# Fields that older checkpoints have at the top, with the text model's own fields beside vision_config.
_FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
# Fields of the wrapper that count before the text model's.
_OF_WRAPPER = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
_TIED = "tie_word_embeddings"
_TEXT_NAME = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?P<name>.+)")
# Names of the text model's tensors in checkpoints that do not mark it.
_PLAIN = (f"{HEAD}.", "model.embed_tokens.", "model.layers.", "model.norm.")


def text_config(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the config of the text model in a wrapper's config.json, as if it had been saved alone.

    It is marked by TOWER_FIELD, the class of the wrapper. A config that wraps nothing is returned as it is. Raises
    ArtifactError for a wrapper or a text model that is not served.
    """
    kind, inner = str(config.get("model_type")), config.get("text_config")
    if kind in FAMILIES:
        return dict(config)
    wrapper = str((config.get("architectures") or [kind])[0])
    if not isinstance(inner, dict):
        fields = {name: value for name, value in config.items() if not isinstance(value, dict) or "rope" in name}
        inner = {**fields, "model_type": _FLAT.get(kind, kind)}
    own = str(inner.get("model_type") or "llama")  # transformers' default
    if why := WRAPPERS_REFUSED.get(kind) or WRAPPERS_REFUSED.get(own):
        raise ArtifactError(CONFIG_FILE, f"{wrapper} is not supported for its text model, {own}: {why}")
    if kind not in WRAPPERS or own not in TEXT_FAMILIES:
        served = ", ".join(sorted(WRAPPERS if kind not in WRAPPERS else TEXT_FAMILIES))
        what = f"model_type {kind!r}" if kind not in WRAPPERS else f"text_config.model_type {own!r}"
        raise ArtifactError(CONFIG_FILE, f"{what} is not supported beside a tower for images or sound, only {served}")
    family = FAMILIES[TEXT_FAMILIES[own]]
    taken = {name: config[name] for name in _OF_WRAPPER if config.get(name) is not None}
    text = DEFAULTS.get(own, {}) | inner | taken | _FIXED.get(own, {}) | _rope(inner, own)
    if own == "glm4v_text" and not text.get("head_dim"):  # GLM-4 has a default of its own
        text |= {"head_dim": config_count(text, "hidden_size") // config_count(text, "num_attention_heads")}
    ties = {config.get(_TIED), inner.get(_TIED)}
    has_head = f"{HEAD}.weight" in read_checkpoint(directory).tensors
    return text | {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        _TIED: not has_head and (True in ties or False not in ties),
        TOWER_FIELD: wrapper,
    }


def _rope(inner: Mapping[str, Any], own: str) -> dict[str, Any]:
    """Return the fields of rotary positions without those for images."""
    found: dict[str, Any] = {}
    for field in ("rope_parameters", "rope_scaling"):
        if isinstance(inner.get(field), dict):
            plain = {name: value for name, value in inner[field].items() if not name.startswith("mrope")}
            found[field] = plain | {name: "default" for name, value in plain.items() if value == "mrope"}
    if not any("rope_theta" in values for values in (inner, *found.values())) and own in ROPE_THETA:
        found["rope_theta"] = ROPE_THETA[own]
    return found


def text_checkpoint(tensors: Mapping[str, tuple[Path, TensorInfo]]) -> Checkpoint:
    """Return the text model's tensors, by the names that they have in a checkpoint of it alone."""
    names = {text: name for name in tensors if (text := _text_name(name))}
    return Checkpoint({text: tensors[name] for text, name in names.items()}, names)


def _text_name(name: str) -> str:
    """Return a tensor's name in a checkpoint of the text model; empty for one of the wrapper's other parts."""
    if match := _TEXT_NAME.fullmatch(name):
        return match["name"] if match["name"].startswith(f"{HEAD}.") else f"model.{match['name']}"
    return name if name.startswith(_PLAIN) else ""


def text_files(directory: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files that differ from those in the directory: config.json, and the chat template of a processor."""
    files = {CONFIG_FILE: json.dumps(config).encode()}
    path = directory / "chat_template.json"
    if path.is_file() and not (directory / "chat_template.jinja").is_file():
        template = parse_object(read_small_file(path), path.name).get("chat_template")
        if isinstance(template, str):
            files["chat_template.jinja"] = template.encode()
    return files
