from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.checkpoint import TensorInfo, read_header

PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file_of(tmp_path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_reads_what_the_library_wrote(tmp_path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    path = tmp_path / "good.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    data = path.read_bytes()
    loaded = load_file(path)
    assert set(header) == set(tensors)
    for name, info in header.items():
        assert (info.dtype, info.shape) == ("F32", tensors[name].shape)
        assert data[info.start : info.end] == loaded[name].tobytes()


def test_scalars_and_empty_tensors_have_their_place(tmp_path: Path) -> None:
    header = {
        "scalar": {"dtype": "F16", "shape": [], "data_offsets": [0, 2]},
        "empty": {"dtype": "F32", "shape": [0, 4], "data_offsets": [2, 2]},
    }
    path = file_of(tmp_path, header, b"\0\0")
    start = path.stat().st_size - 2
    assert read_header(path) == {
        "scalar": TensorInfo("F16", (), start, start + 2),
        "empty": TensorInfo("F32", (0, 4), start + 2, start + 2),
    }


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", "not a JSON object"),
        (b"[1]", b"", "not a JSON object"),
        (b"{", b"", "not valid JSON"),
        (b'{"a": NaN}', b"", "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, b"", "nested too deeply"),
        (b'{"a":1,"a":2}', b"", "given twice"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "tensor a does not have exactly"),
        ({"a": PAIR | {"dtype": "F31"}}, b"\0" * 8, "unknown dtype 'F31'"),
        ({"a": PAIR | {"dtype": ["F32"]}}, b"\0" * 8, "unknown dtype"),
        ({"a": PAIR | {"shape": [-2]}}, b"\0" * 8, "a shape that is none"),
        ({"a": PAIR | {"shape": [True, 2]}}, b"\0" * 8, "a shape that is none"),
        ({"a": PAIR | {"shape": [2.0]}}, b"\0" * 8, "a shape that is none"),
        ({"a": PAIR | {"data_offsets": [0]}}, b"\0" * 8, "data_offsets"),
        ({"a": PAIR | {"data_offsets": [8, 0]}}, b"\0" * 8, "has -8 bytes"),
        ({"a": PAIR | {"shape": [3]}}, b"\0" * 8, "has 8 bytes, which is not what"),
        ({"a": PAIR | {"shape": [2**62, 4]}}, b"\0" * 8, "has 8 bytes, which is not what"),
        ({"a": PAIR}, b"\0" * 7, "is cut short"),
        ({"a": PAIR}, b"\0" * 9, "belong to no tensor"),
        ({"a": PAIR, "b": PAIR}, b"\0" * 8, "tensor b leaves a hole or overlaps"),
        ({"a": PAIR | {"data_offsets": [8, 16]}}, b"\0" * 16, "tensor a leaves a hole or overlaps"),
    ],
)
def test_each_broken_header_is_refused_with_the_files_name(
    tmp_path: Path, header: Any, data: bytes, message: str
) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        read_header(file_of(tmp_path, header, data))
    assert caught.value.subject == "bad.safetensors"


@pytest.mark.parametrize("data", [b"", b"1234567", (2**63).to_bytes(8, "little"), (9).to_bytes(8, "little") + b"{}"])
def test_lengths_beyond_the_file_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(ArtifactError, match="is not a safetensors file"):
        read_header(tmp_path / "bad.safetensors")


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"gone\.safetensors: cannot be read: No such file"):
        read_header(tmp_path / "gone.safetensors")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(position=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_no_damage_gives_another_error(tmp_path: Path, position: int, value: int, cut: int) -> None:
    header = {"a": PAIR, "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]}}
    path = file_of(tmp_path, header, b"\0" * 16)
    data = bytearray(path.read_bytes())
    data[position % len(data)] = value
    path.write_bytes(data[: len(data) - cut])
    try:
        tensors = read_header(path)
    except ArtifactError:
        return
    assert all(0 < info.start <= info.end <= len(data) for info in tensors.values())
