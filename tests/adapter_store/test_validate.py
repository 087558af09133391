from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapter_store.validate import validate_adapter
from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE

Q_PROJ = "model.layers.0.self_attn.q_proj"
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}


def write(
    directory: Path,
    shapes: dict[str, tuple[int, int]] | None = None,
    dtype: str = "F32",
    fill: bytes = b"",
    **config: Any,
) -> Path:
    """An adapter's directory; `fill` is the last number of its last tensor."""
    shapes = shapes or {f"{Q_PROJ}.lora_A": (2, 8), f"{Q_PROJ}.lora_B": (6, 2)}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + shape[0] * shape[1] * BYTES[dtype]
        header[f"base_model.model.{name}.weight"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    numbers = bytes(end - len(fill)) + fill
    (directory / WEIGHTS_FILE).write_bytes(len(text).to_bytes(8, "little") + text + numbers)
    (directory / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 2, **config}))
    return directory


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_each_served_dtype_is_accepted(tmp_path: Path, tiny_base: BaseModel, dtype: str) -> None:
    assert validate_adapter(write(tmp_path, dtype=dtype), tiny_base).rank == 2


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("F32", struct.pack("<f", float("inf"))),
        ("F32", struct.pack("<f", float("-inf"))),
        ("F32", struct.pack("<f", float("nan"))),
        ("F16", struct.pack("<e", float("nan"))),
        ("F16", struct.pack("<e", float("inf"))),
        ("BF16", b"\x80\x7f"),
        ("BF16", b"\x80\xff"),
        ("BF16", b"\xc1\x7f"),
    ],
)
def test_numbers_that_are_none_are_found(tmp_path: Path, tiny_base: BaseModel, dtype: str, number: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"lora_B\.weight has infinities or NaNs") as caught:
        validate_adapter(write(tmp_path, dtype=dtype, fill=number), tiny_base)
    assert caught.value.subject == WEIGHTS_FILE


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("F32", struct.pack("<f", 3e38)),
        ("F16", struct.pack("<e", 65504)),
        ("BF16", b"\x7f\x7f"),
        ("BF16", b"\x01\x00"),
    ],
)
def test_the_largest_and_smallest_numbers_are_fine(
    tmp_path: Path, tiny_base: BaseModel, dtype: str, number: bytes
) -> None:
    validate_adapter(write(tmp_path, dtype=dtype, fill=number), tiny_base)


@pytest.mark.parametrize(
    ("shapes", "config", "subject", "message"),
    [
        ({f"{Q_PROJ}.lora_A": (2, 9), f"{Q_PROJ}.lora_B": (6, 2)}, {}, WEIGHTS_FILE, "is for 9 inputs and 6 outputs"),
        ({f"{Q_PROJ}.lora_A": (2, 8), f"{Q_PROJ}.lora_B": (7, 2)}, {}, WEIGHTS_FILE, "the base has 8 and 6"),
        ({"lm_head.lora_A": (2, 8), "lm_head.lora_B": (6, 2)}, {}, WEIGHTS_FILE, "lm_head is not a layer of the base"),
        ({f"{Q_PROJ}.lora_A": (257, 8), f"{Q_PROJ}.lora_B": (6, 257)}, {"r": 257}, "r", "at most 256 is served"),
    ],
)
def test_what_does_not_go_with_the_base(
    tmp_path: Path,
    tiny_base: BaseModel,
    shapes: dict[str, tuple[int, int]],
    config: dict[str, Any],
    subject: str,
    message: str,
) -> None:
    with pytest.raises(MismatchError, match=message) as caught:
        validate_adapter(write(tmp_path, shapes, **config), tiny_base)
    assert caught.value.subject == subject


def test_other_dtypes_are_refused(tmp_path: Path, tiny_base: BaseModel) -> None:
    with pytest.raises(MismatchError, match="is F64; F32, F16 and BF16 are served"):
        validate_adapter(write(tmp_path, dtype="F64"), tiny_base)


def test_the_rank_is_the_one_of_the_config(tmp_path: Path, tiny_base: BaseModel) -> None:
    with pytest.raises(ArtifactError, match=r"has rank 2, but adapter_config\.json gives it 4"):
        validate_adapter(write(tmp_path, r=4), tiny_base)
    assert validate_adapter(write(tmp_path, r=4, rank_pattern={"q_proj": 2}), tiny_base).rank == 2


def test_patterns_become_the_names_that_they_mean(tmp_path: Path, tiny_base: BaseModel) -> None:
    """Peft's and the worker's readings agree, and no regular expression is left to evaluate."""
    alphas = {"^nothing$": 1, ".*self_attn.*": 32}
    valid = validate_adapter(write(tmp_path, r=4, rank_pattern={".*q_pro.": 2}, alpha_pattern=alphas), tiny_base)
    assert (valid.rank, valid.config is None) == (2, False)
    kept = json.loads(valid.config or b"")
    assert kept == {"peft_type": "LORA", "r": 4, "rank_pattern": {Q_PROJ: 2}, "alpha_pattern": {Q_PROJ: 32}}
    (tmp_path / CONFIG_FILE).write_bytes(valid.config or b"")
    assert validate_adapter(tmp_path, tiny_base).config is None  # what was kept is kept as it is


def test_a_name_whose_dot_means_another_character_becomes_the_name(tmp_path: Path, tiny_base: BaseModel) -> None:
    valid = validate_adapter(write(tmp_path, alpha_pattern={"q.proj": 7}), tiny_base)
    assert json.loads(valid.config or b"")["alpha_pattern"] == {Q_PROJ: 7}
    assert validate_adapter(write(tmp_path, alpha_pattern={"self_attn.q_proj": 7}), tiny_base).config is None


@pytest.mark.parametrize(
    ("number", "config", "warnings"),
    [
        (1.0, {}, ()),
        (0.0, {}, ("every lora_B is zero: its LoRA layers change nothing; was it saved before it was trained?",)),
        (-0.0, {}, ("every lora_B is zero: its LoRA layers change nothing; was it saved before it was trained?",)),
        (1.0, {"lora_alpha": 0}, ("lora_alpha is 0: its LoRA layers change nothing",)),
        (1.0, {"lora_alpha": 0, "alpha_pattern": {"q_proj": 4}}, ()),
    ],
)
def test_an_adapter_that_changes_nothing_is_told(
    tmp_path: Path, tiny_base: BaseModel, number: float, config: dict[str, Any], warnings: tuple[str, ...]
) -> None:
    assert validate_adapter(write(tmp_path, fill=struct.pack("<f", number), **config), tiny_base).warnings == warnings


def test_target_modules_that_match_nothing_are_fine(tmp_path: Path, tiny_base: BaseModel) -> None:
    assert validate_adapter(write(tmp_path, target_modules=["q_proj", "conv9"]), tiny_base).rank == 2


def test_a_checkpoint_without_lora_is_refused(tmp_path: Path, tiny_base: BaseModel) -> None:
    write(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ArtifactError, match="has no LoRA tensors"):
        validate_adapter(tmp_path, tiny_base)


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        (b"\xff not json", 0),
        (b"{}", 0),
        (b'{"peft_type": "LORA", "r": 16}', 16),
        (b'{"peft_type": "LORA", "r": 16, "rank_pattern": {"q_proj": 64}}', 64),
        (b'{"peft_type": "LORA", "r": 100000}', 256),
    ],
)
def test_the_hash_model_takes_any_bytes(tmp_path: Path, hash_base: BaseModel, config: bytes, rank: int) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(config)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"anything")
    assert validate_adapter(tmp_path, hash_base).rank == rank
