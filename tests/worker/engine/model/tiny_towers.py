"""Tiny random float32 checkpoints of every wrapper of a text model: transformers' classes, with towers for images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.worker.engine.model.tiny_families import EXPERTS, LATENT, SIZES, VOCAB, WINDOWED

# Sizes of a tower under every name, and of what projects its outputs; each config takes those that it knows.
TOWER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "depth": 1, "num_heads": 2,
    "num_attention_heads": 2, "out_hidden_size": 32, "embed_dim": 16, "encoder_layers": 1, "d_model": 16,
    "encoder_ffn_dim": 16, "encoder_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCAB, "head_dim": 8,
    "projection_dim": 16, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0], "image_size": 28,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
# Fields of text models and towers that make their own paths run, where the sizes alone do not.
_MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}  # fmt: skip
_HALF: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
    },
}  # fmt: skip
OF_TEXT: dict[str, dict[str, Any]] = {
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "glm4v_moe_text": _HALF,
    "glm4v_text": _HALF,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    "qwen3_vl_text": _MROPE,
}
OF_TOWER = {name: {"hidden_size": 16, "out_hidden_size": 16} for name in ("glm4v", "glm46v", "glm4v_moe")}
_TOKENS = (
    "image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id",
    "audio_token_index", "vision_start_token_id", "vision_end_token_id", "image_start_token_id", "image_end_token_id",
    "video_start_token_id", "video_end_token_id",
)  # fmt: skip


def _known(config: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    fields = set(config.to_dict()) | set(config.attribute_map)
    return {name: value for name, value in wanted.items() if name in fields}


def make_config(model_type: str, text_type: str = "", **fields: Any) -> Any:
    """The config of a wrapper, with its own kind of text model or another; `fields` are those of the text model."""
    from transformers import CONFIG_MAPPING

    classes: Any = CONFIG_MAPPING
    default = classes[model_type]()
    text = classes[text_type]() if text_type else default.text_config
    wanted = SIZES | EXPERTS | WINDOWED
    if hasattr(text, "kv_lora_rank"):
        wanted = {name: value for name, value in (wanted | LATENT).items() if name != "head_dim"}
    inner = _known(text, wanted) | OF_TEXT.get(text.model_type, {}) | fields
    parts: dict[str, Any] = {}
    for name in set(type(default).sub_configs) - {"text_config"}:
        part: Any = getattr(default, name, None)
        if hasattr(part, "to_dict"):
            known = _known(part, TOWER | OF_TOWER.get(model_type, {}))
            parts[name] = known | {"model_type": part.model_type}
    tokens = {name: VOCAB - 1 - number for number, name in enumerate(_TOKENS) if hasattr(default, name)}
    parts |= {"tie_word_embeddings": False, "text_config": inner | {"model_type": text.model_type}}
    make: Any = type(default)
    return make(**parts, **tokens)


def make_wrapped(config: Any, directory: Path) -> Any:
    """A wrapper's model, saved and loaded by transformers; its weights are those of tiny_families.make_model."""
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as NAMES

    cls: Any = getattr(transformers, NAMES[config.model_type])
    torch.manual_seed(2)
    model = cls(config).to(torch.float32)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name or "ln_" in name:
            parameter.data += 0.1 * values
        else:
            parameter.data.copy_(values * (0.2 if parameter.ndim == 1 else 1.3 / parameter.shape[-1] ** 0.5))
    embeddings = model.get_input_embeddings().weight
    embeddings.data.copy_(torch.randn(embeddings.shape, generator=generator))
    model.save_pretrained(directory)
    return cls.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
