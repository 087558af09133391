from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.artifacts.checkpoint import TensorInfo
from loraplex.contracts.artifacts.names import is_digest, sha256_bytes
from loraplex.contracts.artifacts.peft_config import parse_peft_config
from loraplex.contracts.artifacts.revision import base_copies, check_copies, lora_tensors, revision_digest, trained_ends

WEIGHTS = sha256_bytes(b"weights")
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


def tensor(*shape: int) -> TensorInfo:
    return TensorInfo("F32", shape, 0, 0)


def test_the_digest_does_not_depend_on_the_order_of_keys_or_on_spaces() -> None:
    assert revision_digest(b'{"r": 8, "x": {"a": 1, "b": 2}}', WEIGHTS) == revision_digest(
        b'{"x":{"b":2,"a":1},"r":8}', WEIGHTS
    )


def test_the_digest_depends_on_everything_that_is_served() -> None:
    digests = {
        revision_digest(b'{"r": 8}', WEIGHTS),
        revision_digest(b'{"r": 9}', WEIGHTS),
        revision_digest(b'{"r": 8}', sha256_bytes(b"other")),
        # The first pattern that matches counts: another order can be another adapter.
        revision_digest(b'{"alpha_pattern": {"q_proj": 1, "proj": 2}}', WEIGHTS),
        revision_digest(b'{"alpha_pattern": {"proj": 2, "q_proj": 1}}', WEIGHTS),
    }
    assert len(digests) == 5


def test_the_digest_is_fixed_for_all_time() -> None:
    """A change here makes every stored revision another one: raise the format number instead."""
    assert (
        revision_digest(b'{"r": 8, "peft_type": "LORA"}', WEIGHTS)
        == "sha256:690843ac6caad0a993c7b160dc1d343fa5ba2e9e41b8acf3443db5a9f7e8a544"
    )


@given(config=st.binary(max_size=200) | st.from_type(dict).map(lambda value: json.dumps(value, default=str).encode()))
def test_any_bytes_have_a_digest(config: bytes) -> None:
    assert is_digest(revision_digest(config, WEIGHTS))
    assert revision_digest(config, WEIGHTS) == revision_digest(config, WEIGHTS)


def test_deep_nesting_has_the_same_digest_from_any_stack() -> None:
    deep = b'{"a":' + b"[" * 400 + b"]" * 400 + b"}"

    def at_depth(levels: int) -> str:
        return at_depth(levels - 1) if levels else revision_digest(deep, WEIGHTS)

    assert at_depth(0) == at_depth(500)


def test_tensors_belong_to_modules_of_the_base() -> None:
    header = {f"{PREFIX}.lora_B.weight": tensor(16, 4), f"{PREFIX}.lora_A.weight": tensor(4, 8)}
    assert lora_tensors(header) == {"model.layers.0.self_attn.q_proj": (4, 8, 16)}


def test_dora_wants_a_magnitude_for_every_output() -> None:
    header = {f"{PREFIX}.lora_B.weight": tensor(16, 4), f"{PREFIX}.lora_A.weight": tensor(4, 8)}
    with pytest.raises(ArtifactError, match="lora_magnitude_vector is missing"):
        lora_tensors(header, use_dora=True)
    magnitude = f"{PREFIX}.lora_magnitude_vector"
    assert len(lora_tensors(header | {magnitude: tensor(16)}, use_dora=True)) == 1
    with pytest.raises(ArtifactError, match="has 8 numbers for 16"):
        lora_tensors(header | {magnitude: tensor(8)}, use_dora=True)
    with pytest.raises(ArtifactError, match="one size is needed"):
        lora_tensors(header | {magnitude: tensor(16, 1)}, use_dora=True)


def test_embeddings_and_head_come_with_copies_of_the_bases_own() -> None:
    end = "base_model.model.model.embed_tokens"
    copies = {
        f"{end}.base_layer.weight": tensor(32, 8),
        "base_model.model.lm_head.base_layer.weight": tensor(32, 8),
        "base_model.model.lm_head.base_layer.bias": tensor(32),
    }
    header = {f"{end}.lora_embedding_A": tensor(4, 32), f"{end}.lora_embedding_B": tensor(8, 4)} | copies
    assert lora_tensors(header) == {"model.embed_tokens": (4, 32, 8)}
    assert list(base_copies(header).values()) == ["model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"]
    assert base_copies(header).keys() == copies.keys()
    whole = {f"{end}.weight": tensor(32, 8), "base_model.model.lm_head.weight": tensor(32, 8)}
    assert list(base_copies(whole).values()) == ["model.embed_tokens.weight", "lm_head.weight"]
    assert list(base_copies(whole, [f"{end}.weight"]).values()) == ["lm_head.weight"]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        (
            "model.embed_tokens",
            34,
            r"was trained with 34 tokens, the base has 32; train new tokens in rows that no token",
        ),
        ("model.embed_tokens.base_layer", 34, r"was trained with 34 tokens, the base has 32; "),
        ("lm_head", 49_154, r"was trained with 49,154 tokens, the base has 32; .* or merge the adapter into its model"),
        ("lm_head", 30, r"was trained with 30 tokens, the base has 32; leave out resize_token_embeddings"),
    ],
)
def test_embeddings_of_another_vocabulary_are_told_by_their_sizes(name: str, rows: int, message: str) -> None:
    header = {f"base_model.model.{name}.weight": tensor(rows, 8)}
    sizes = {"model.embed_tokens": (32, 8), "lm_head": (8, 32)}
    with pytest.raises(MismatchError, match=message):
        check_copies(header, sizes)
    config = parse_peft_config(b'{"peft_type": "LORA", "r": 1, "modules_to_save": ["embed_tokens", "lm_head"]}')
    if ".base_layer" not in name:
        other = next(one for one in sizes if one != name)
        with pytest.raises(MismatchError, match=message):
            trained_ends(header | {f"base_model.model.{other}.weight": tensor(32, 8)}, config, sizes)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({}, "has no LoRA tensors"),
        ({f"{PREFIX}.weight": tensor(4, 8)}, "q_proj.weight is not a LoRA weight"),
        ({f"{PREFIX}.lora_magnitude_vector": tensor(8)}, "lora_magnitude_vector is not a LoRA weight"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": tensor(4, 8)}, "lora_embedding_B is missing"),
        ({"base_model.model.model.embed_tokens.lora_A.weight": tensor(4, 8)}, "lora_A.weight is not a LoRA weight"),
        ({f"{PREFIX}.lora_embedding_A": tensor(4, 8)}, "lora_embedding_A is not a LoRA weight"),
        ({f"{PREFIX}.base_layer.weight": tensor(4, 8)}, "base_layer.weight, a weight of the base"),
        ({f"{PREFIX}.lora_A.default.weight": tensor(4, 8)}, "default.weight is not a LoRA weight"),
        ({"model.q_proj.lora_A.weight": tensor(4, 8)}, "model.q_proj.lora_A.weight is not a LoRA weight"),
        ({f"{PREFIX}.lora_A.weight": tensor(4, 8)}, "q_proj.lora_B.weight is missing"),
        ({f"{PREFIX}.lora_B.weight": tensor(8, 4)}, "q_proj.lora_A.weight is missing"),
        ({f"{PREFIX}.lora_A.weight": tensor(4)}, "two sizes are needed"),
        ({f"{PREFIX}.lora_A.weight": tensor(4, 0)}, "two sizes are needed"),
        (
            {f"{PREFIX}.lora_A.weight": tensor(4, 8), f"{PREFIX}.lora_B.weight": tensor(8, 5)},
            "lora_A has rank 4, lora_B 5",
        ),
    ],
)
def test_every_tensor_must_be_understood(header: dict[str, TensorInfo], message: str) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        lora_tensors(header)
    assert caught.value.subject == "adapter_model.safetensors"
