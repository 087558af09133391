"""The schemes' names, sizes and digests. Checkpoints that come quantized are read in tests/worker/engine/quantized/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.quantization import check_device, parse_quantization, quantized_digest, stored_scheme

NAMES = ("int8", "int8-zero-point", "int8-dynamic", "int4", "int4-64", "int4-128", "int4-dynamic", "fp8")


@pytest.mark.parametrize("name", [*NAMES, *(f"{name}+embeddings" for name in NAMES)])
def test_names_read_back_what_they_print(name: str) -> None:
    scheme = parse_quantization(name)
    assert str(scheme) == name
    assert scheme is not None
    assert scheme.embeddings == name.endswith("+embeddings")


@pytest.mark.parametrize("name", ["int2", "int4-", "int8+embeddings+embeddings", "+embeddings", "INT8"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(
        ArtifactError, match=r"^--quantize: '.*' is not one of int8, int8-zero-point, int8-dynamic, int4, "
    ):
        parse_quantization(name)
    assert parse_quantization("") is None


def test_groups_of_32_have_a_second_name() -> None:
    assert parse_quantization("int4-32+embeddings") == parse_quantization("int4+embeddings")


def test_a_scheme_of_one_kind_of_device_needs_it() -> None:
    check_device(parse_quantization("fp8"), "cuda:1")
    check_device(parse_quantization("int4"), "cpu")
    with pytest.raises(ArtifactError, match="fp8 needs a CUDA device"):
        check_device(parse_quantization("fp8"), "cpu")
    for scheme in ("int8", "int4"):
        check_device(parse_quantization(f"{scheme}-dynamic"), "cpu")
        with pytest.raises(ArtifactError, match=f"{scheme}-dynamic needs a CPU .*; on CUDA use {scheme}$"):
            check_device(parse_quantization(f"{scheme}-dynamic"), "cuda")


@pytest.mark.parametrize(("name", "group"), [("int4-dynamic", 32), ("int4-96-dynamic", 96)])
def test_inputs_in_8_bits_go_with_groups_that_are_parts_of_theirs(name: str, group: int) -> None:
    """In kernels a scale of 128 inputs is that of whole groups of columns."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": False}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "loraplex": {"original": "sha256:" + "0" * 64, "quantization": name},
    }
    if group == 32:
        scheme = stored_scheme({"quantization_config": config})
        assert scheme is not None
        assert scheme.quantization == parse_quantization(name)
    else:
        with pytest.raises(ArtifactError, match="int4-96-dynamic: inputs in 8 bits are served with other groups alone"):
            stored_scheme({"quantization_config": config})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int8", 6 * 300 + 6 * 4),
        ("int8-zero-point", 6 * 300 + 6 * 8),
        ("int4", 6 * 150 + 6 * 10 * 3),
        ("int4-128", 6 * 150 + 6 * 3 * 3),
        ("fp8", 6 * 300 + 6 * 4),
    ],
)
def test_the_bytes_of_a_weight(name: str, expected: int) -> None:
    scheme = parse_quantization(name)
    assert scheme is not None
    assert scheme.weight_bytes(6, 300) == expected


def test_a_quantized_base_has_a_digest_of_its_own_and_its_originals_adapters(model_directory: Path) -> None:
    original = read_base_model(str(model_directory))
    assert (original.quantization, original.original_digest, original.adapted_digest) == ("", "", original.digest)
    digests = {original.digest}
    for name in (*NAMES, "int8+embeddings"):
        base = read_base_model(str(model_directory), quantize=name)
        scheme = parse_quantization(name)
        assert scheme is not None
        assert base.digest == quantized_digest(original.digest, scheme)
        assert (base.quantization, base.original_digest, base.adapted_digest) == (name, *[original.digest] * 2)
        assert base.modules == original.modules
        digests.add(base.digest)
    assert len(digests) == len(NAMES) + 2


def test_a_quantized_kv_cache_makes_another_base_with_the_same_adapters(model_directory: Path) -> None:
    plain = read_base_model(str(model_directory))
    digests = {plain.digest}
    for quantize in ("", "int8"):
        without = read_base_model(str(model_directory), quantize=quantize)
        base = read_base_model(str(model_directory), quantize=quantize, kv_cache_dtype="int8")
        assert (base.kv_cache_dtype, base.quantization) == ("int8", quantize)
        assert base.adapted_digest == plain.digest
        assert base.modules == plain.modules
        digests |= {without.digest, base.digest}
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("model", "name", "words"),
    [
        ("hash:?", "int8", "int8: a hash model has no keys and values"),
        ("bert", "int8", "int8: bert is an encoder, which has no KV cache"),
        ("llama", "int4", "'int4' is not int8; leave it out for the dtype that the model computes in"),
    ],
)
def test_a_kv_cache_that_is_not_there_is_refused(
    model: str, name: str, words: str, model_directory: Path, change_json: Callable[..., None]
) -> None:
    if model == "bert":
        change_json(model_directory / "config.json", model_type="bert")
    place = model if model.startswith("hash:") else str(model_directory)
    with pytest.raises(ArtifactError, match=f"^--kv-cache-dtype: {words}"):
        read_base_model(place, kv_cache_dtype=name)


def test_what_has_no_weights_of_that_kind_is_refused(
    model_directory: Path, tensors: dict[str, Any], change_json: Callable[..., None]
) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    with pytest.raises(ArtifactError, match="--quantize: int8: a hash model has no weights"):
        read_base_model("hash:?", quantize="int8")
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((8, 7), np.float32)
    save_file(tensors, model_directory / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"int4: model\.layers\.0\.self_attn\.q_proj has an odd number of columns"):
        read_base_model(str(model_directory), quantize="int4")
    assert read_base_model(str(model_directory), quantize="int8").quantization == "int8"
