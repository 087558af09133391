"""The KV shape of a config.json: only fields that the family reads count."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.families import KvShape, kv_shape

SIZES: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}
# Fields that other families read.
STRAY = {"head_dim": 16, "num_key_value_heads": 2, "kv_lora_rank": 16, "v_head_dim": 6, "multi_query": True}


@pytest.mark.parametrize(
    ("model_type", "fields", "shape"),
    [
        ("llama", {}, KvShape(3, 4, 8, 8)),
        ("llama", {"num_key_value_heads": 2, "head_dim": 16}, KvShape(3, 2, 16, 16)),
        ("llama", {"num_key_value_heads": None, "head_dim": None}, KvShape(3, 4, 8, 8)),
        ("llama", {"kv_lora_rank": 16, "multi_query": True}, KvShape(3, 4, 8, 8)),
        ("gpt_neox", STRAY, KvShape(3, 4, 8, 8)),
        ("gpt2", STRAY, KvShape(3, 4, 8, 8)),
        ("opt", STRAY, KvShape(3, 4, 8, 8)),
        ("gpt_bigcode", STRAY, KvShape(3, 1, 8, 8)),
        ("gpt_bigcode", STRAY | {"multi_query": False}, KvShape(3, 4, 8, 8)),
        (
            "deepseek_v3",
            {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 2},
            KvShape(3, 4, 12, 6),
        ),
    ],
)
def test_the_shape_is_that_of_the_fields_that_the_family_reads(
    model_type: str, fields: dict[str, Any], shape: KvShape
) -> None:
    assert kv_shape({"model_type": model_type, **SIZES, **fields}) == shape


def test_older_names_of_sizes_count() -> None:
    assert kv_shape({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 12}) == KvShape(2, 2, 6, 6)


@pytest.mark.parametrize("value", [0, -1, "8", 2.0, True, 1 << 31])
def test_a_size_that_is_none_is_refused_by_name(value: object) -> None:
    with pytest.raises(ArtifactError, match=r"config.json.*head_dim is .*, not a whole number from 1"):
        kv_shape({"model_type": "llama", **SIZES, "head_dim": value})
