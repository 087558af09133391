"""The reader of GGUF headers: what it reads, and that any cut or damage is refused in a sentence."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from loraplex.contracts.artifacts import ArtifactError
from loraplex.model_tools.gguf import file as gguf_file
from loraplex.model_tools.gguf.file import read_gguf


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file with values of several types, and tensors of two."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_float32("llama.epsilon", 0.5)
    writer.add_array("llama.counts", [1, 2, 3])
    writer.add_token_list(["a", "b"])
    writer.add_tensor("rows", np.arange(64 * 3, dtype=np.float32).reshape(3, 64))
    quantized = gguf.quantize(
        np.linspace(-1, 1, 64 * 3, dtype=np.float32).reshape(3, 64), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("blocks", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_keys_and_tensors_are_those_that_gguf_reads(small: Path) -> None:
    read, expected = read_gguf(small), gguf.GGUFReader(small)
    assert read.architecture == "llama"
    assert {key: read.get(key) for key in ("llama.context_length", "llama.epsilon", "llama.counts")} == {
        "llama.context_length": 128, "llama.epsilon": 0.5, "llama.counts": (1, 2, 3),
    }  # fmt: skip
    assert read.get("tokenizer.ggml.tokens") == 2
    assert list(read.tensors) == [tensor.name for tensor in expected.tensors]
    for tensor in expected.tensors:
        np.testing.assert_array_equal(
            read.tensors[tensor.name].read(), gguf.dequantize(tensor.data, tensor.tensor_type)
        )


def test_a_tensor_comes_in_pieces(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_gguf(small).tensors["blocks"].read()
    monkeypatch.setattr(gguf_file, "PIECE_BYTES", 2 * 64 * 4)
    pieces = list(read_gguf(small).tensors["blocks"].pieces())
    assert [(place.start, place.stop) for place, _ in pieces] == [(0, 2), (2, 3)]
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in pieces]), whole)


def test_a_skeleton_has_keys_and_names_alone(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "skeleton.gguf"
    path.write_bytes(read_gguf(small).skeleton())
    reader = gguf.GGUFReader(path)
    assert [tensor.name for tensor in reader.tensors] == ["rows", "blocks"]
    assert reader.fields["llama.context_length"].contents() == 128
    assert "tokenizer.ggml.tokens" not in reader.fields


def test_every_cut_is_refused(small: Path, tmp_path: Path) -> None:
    data, path = small.read_bytes(), tmp_path / "cut.gguf"
    end = max(tensor.end for tensor in read_gguf(small).tensors.values())
    for length in (*range(0, end, 5), end - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ArtifactError, match=r"is truncated: it ends|is not a GGUF file: it does not begin with"):
            read_gguf(path)


def test_damage_is_refused(small: Path, tmp_path: Path) -> None:
    """A byte of the header that is another one may be harmless; what is refused is refused in a sentence."""
    data, path, refused = small.read_bytes(), tmp_path / "damaged.gguf", 0
    for place in range(4, len(data) - 64 * 3 * 4 - 3 * 2 * 34, 2):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        try:
            read_gguf(path)
        except ArtifactError:
            refused += 1
    assert refused > 50


def test_other_versions_and_machines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    for version, sentence in (
        (1, "is GGUF version 1, and only 2 and 3 are read"),
        (3 << 24, "of a big-endian machine"),
    ):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        with pytest.raises(ArtifactError, match=sentence):
            read_gguf(path)


def test_a_value_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 0, 1 << 27)  # an array of 2^27 bytes
    with open(path, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key)
        file.truncate(1 << 28)
    with pytest.raises(ArtifactError, match=r"is not a readable GGUF file: a value of its header has 134217728 bytes$"):
        read_gguf(path)
