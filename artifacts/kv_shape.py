"""The shape and the bytes of a token's keys and values; the shape by a config.json, for planning without the model.

An engine measures the shape instead (worker/engine/model/probe.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from artifacts.errors import ArtifactError
from artifacts.families import FAMILIES, KeyValues

# Name on command lines of a KV cache of 8 bits; by default it is in the dtype that the model computes in.
INT8 = "int8"
FLAG_HELP = "int8: the KV cache in 8 bits; empty: in the dtype that the model computes in"
# Bytes of a scale. Not of 16 bits: it would save 2 of 68 bytes with 64 numbers, and lose numbers below 1e-5.
_SCALE_BYTES = 4

# Names that older families give a size; transformers writes a config with its family's own names.
_OLDER_NAMES = {
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "hidden_size": ("n_embd",),
    "max_position_embeddings": ("n_positions", "n_ctx"),
}


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of all layers; a key and a value of one head have key_dim and value_dim numbers."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers_per_token(self) -> int:
        """Return how many numbers one token's keys and values are, in all layers."""
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim)

    def token_bytes(self, number_bytes: int, kv_cache_dtype: str) -> int:
        """Return the bytes of one token's keys and values in all layers; the model computes in `number_bytes` each."""
        if kv_cache_dtype != INT8:
            return self.numbers_per_token * number_bytes
        return self.numbers_per_token + 2 * self.layers * self.kv_heads * _SCALE_BYTES


def check_kv_cache_dtype(name: str) -> str:
    """Return a dtype of the KV cache if it is known. Raises ArtifactError."""
    if name not in ("", INT8):
        raise ArtifactError(
            "--kv-cache-dtype", f"{name!r} is not {INT8}; leave it out for the dtype that the model computes in"
        )
    return name


def kv_shape(config: Mapping[str, Any]) -> KvShape:
    """Return the shape by the content of a config.json. Raises ArtifactError naming the field at fault.

    Only fields that the family reads count: others may stand in a config, and mean nothing.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    kind = family.key_values if family else KeyValues.GROUPED
    layers, heads = config_count(config, "num_hidden_layers"), config_count(config, "num_attention_heads")
    if kind is KeyValues.LATENT:
        key_dim = config_count(config, "qk_nope_head_dim") + config_count(config, "qk_rope_head_dim")
        return KvShape(layers, heads, key_dim, config_count(config, "v_head_dim"))
    kv_heads, head_dim = heads, None
    if kind is KeyValues.GROUPED:
        kv_heads = _optional_count(config, "num_key_value_heads") or heads
        head_dim = _optional_count(config, "head_dim")
    elif kind is KeyValues.MULTI_QUERY and config.get("multi_query", True):
        kv_heads = 1
    head_dim = head_dim or config_count(config, "hidden_size") // heads
    return KvShape(layers, kv_heads, head_dim, head_dim)


def _optional_count(config: Mapping[str, Any], key: str) -> int | None:
    return None if config.get(key) is None else config_count(config, key)


def config_count(config: Mapping[str, Any], key: str) -> int:
    """Read a whole number from 1, under its own or an older name. Raises ArtifactError."""
    name = next((name for name in (key, *_OLDER_NAMES.get(key, ())) if config.get(name) is not None), key)
    value = config.get(name)
    if type(value) is not int or not 0 < value < 2**31:
        raise ArtifactError("config.json", f"{name} is {value!r}, not a whole number from 1")
    return value
