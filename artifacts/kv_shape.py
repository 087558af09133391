"""What a token's keys and values take, from a config.json: for the KV cache, and for planning without the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from artifacts.errors import ArtifactError

# Older families' names for a size; transformers writes each family's own.
_OLDER_NAMES = {
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "hidden_size": ("n_embd",),
    "max_position_embeddings": ("n_positions", "n_ctx"),
}


@dataclass(frozen=True, slots=True)
class KvShape:
    """The same in every layer; a key and a value of one head have key_dim and value_dim numbers."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers_per_token(self) -> int:
        """Numbers that one token's keys and values are, in all layers."""
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim)


def kv_shape(config: Mapping[str, Any]) -> KvShape:
    """The shape by the content of a config.json. Raises ArtifactError naming the field that is missing or wrong."""
    layers, heads = config_count(config, "num_hidden_layers"), config_count(config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        # Latent attention: transformers expands the latent to every head before it attends.
        key_dim = config_count(config, "qk_nope_head_dim") + config_count(config, "qk_rope_head_dim")
        return KvShape(layers, heads, key_dim, config_count(config, "v_head_dim"))
    kv_heads = heads
    if config.get("multi_query"):
        kv_heads = 1
    elif config.get("num_key_value_heads") is not None:
        kv_heads = config_count(config, "num_key_value_heads")
    if config.get("head_dim") is None:
        head_dim = config_count(config, "hidden_size") // heads
    else:
        head_dim = config_count(config, "head_dim")
    return KvShape(layers, kv_heads, head_dim, head_dim)


def config_count(config: Mapping[str, Any], key: str) -> int:
    """A whole number from 1, under its own or an older name. Raises ArtifactError."""
    name = next((name for name in (key, *_OLDER_NAMES.get(key, ())) if config.get(name) is not None), key)
    value = config.get(name)
    if type(value) is not int or not 0 < value < 2**31:
        raise ArtifactError("config.json", f"{name} is {value!r}, not a whole number from 1")
    return value
