"""Reads the header of a GGUF file, or of all parts of a split one, and its tensors piece by piece.

    magic, version, number of tensors, number of keys | keys and values | names, shapes, types, offsets | data

Every length is checked before it is read: a truncated file, or one that is none, is refused in a sentence. The package
gguf has a reader too, which makes an array of every token of the vocabulary (4 s for 49,152 of them) and fails in its
middle on a truncated file; it knows the types of tensors, and dequantizes them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from numpy.typing import NDArray

from loraplex.checkpoints.gguf_names import parts_of
from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.gguf_files import MAGIC

_VERSIONS = (2, 3)
# Formats of struct of the types of values that have one size, by their number; strings and arrays have none.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Maximum number of dimensions of a tensor in ggml.
_DIMENSIONS = 4
# Maximum bytes of a text or an array of numbers in a header; vocabularies have 2 MB.
_VALUE_BYTES = 64 << 20
# Maximum bytes of a tensor in float32 that are read at once.
PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A key's value, and the bytes of both as they are in the file; of an array of texts the value is their number."""

    value: Any
    raw: bytes


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's shape as torch has it, its type, and where it is in which file."""

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    path: Path
    start: int
    end: int

    def pieces(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Yield the tensor in float32 as [rows, columns] of at most PIECE_BYTES: the rows' place, and the rows.

        A row is the last dimension, which blocks of quantized values never cross. Raises ArtifactError, OSError.
        """
        columns = self.shape[-1]
        rows = math.prod(self.shape[:-1])
        row_bytes = (self.end - self.start) // max(rows, 1)
        step = max(1, PIECE_BYTES // (4 * columns))
        with open(self.path, "rb") as file:
            file.seek(self.start)
            for first in range(0, rows, step):
                last = min(first + step, rows)
                data = bytearray((last - first) * row_bytes)
                if file.readinto(data) < len(data):
                    raise _truncated(self.path, f"in tensor {self.name}")
                values = np.frombuffer(data, np.uint8).reshape(last - first, row_bytes)
                yield slice(first, last), gguf.dequantize(values, self.type).reshape(last - first, columns)

    def read(self) -> NDArray[np.float32]:
        """Read a small tensor, in float32. Raises ArtifactError, OSError."""
        return np.concatenate([rows for _, rows in self.pieces()]).reshape(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file, or all parts of a split one: keys of the first part, tensors of all."""

    paths: tuple[Path, ...]
    entries: Mapping[str, KeyEntry] = field(repr=False)
    tensors: Mapping[str, TensorEntry] = field(repr=False)

    @property
    def name(self) -> str:
        """Return the first part's path, for messages."""
        return str(self.paths[0])

    @property
    def architecture(self) -> str:
        """Return the name of the architecture. Raises ArtifactError."""
        name = self.get("general.architecture")
        if not isinstance(name, str):
            raise ArtifactError(self.name, "has no general.architecture, so that nobody can tell what model it is")
        return name

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value."""
        return self.entries[key].value if key in self.entries else default

    def skeleton(self) -> bytes:
        """Return a GGUF file with the same keys but the tokenizer's arrays, and the same tensors without numbers."""
        kept = [entry.raw for key, entry in self.entries.items() if not _is_long(key, entry.value)]
        # Each has one dimension of 0, type 0 (F32) and offset 0.
        tensors = [_text(name) + struct.pack("<IQIQ", 1, 0, 0, 0) for name in self.tensors]
        head = MAGIC + struct.pack("<IQQ", _VERSIONS[-1], len(tensors), len(kept))
        # Readers map the data, so that there must be a byte after the header's padding.
        return head + b"".join(kept + tensors) + bytes(64)


def _is_long(key: str, value: Any) -> bool:
    return key.startswith("tokenizer.") and (isinstance(value, tuple) or key.endswith((".tokens", ".merges")))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def read_gguf(path: Path) -> GgufFile:
    """Read the headers of a file and of all its parts; the tensors' data must be there. Raises ArtifactError."""
    paths = parts_of(path)
    try:
        headers = [_Header(part).read() for part in paths]
    except OSError as error:
        raise ArtifactError(error.filename or str(path), f"cannot be read: {error.strerror}") from error
    entries = headers[0][0]
    count = entries["split.count"].value if "split.count" in entries else 1
    if count not in (0, len(paths)):
        raise ArtifactError(
            str(path), f"is one of {count} parts; name them NAME-00001-of-{count:05}.gguf and so on in one folder"
        )
    tensors: dict[str, TensorEntry] = {}
    for _, of_part in headers:
        for tensor in of_part:
            if tensor.name in tensors:
                raise ArtifactError(str(tensor.path), f"has tensor {tensor.name} a second time")
            tensors[tensor.name] = tensor
    return GgufFile(paths, entries, tensors)


def _truncated(path: Path, where: str) -> ArtifactError:
    return ArtifactError(str(path), f"is truncated: it ends {where}; download or copy it again")


class _Header:
    """Reads the header of one file from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = path.stat().st_size
        self._kept = bytearray()

    def read(self) -> tuple[dict[str, KeyEntry], list[TensorEntry]]:
        """Read keys and tensors. Raises ArtifactError, OSError."""
        with open(self._path, "rb") as file:
            self._file: BinaryIO = file
            if file.read(len(MAGIC)) != MAGIC:
                raise ArtifactError(str(self._path), "is not a GGUF file: it does not begin with GGUF")
            try:
                return self._read()
            except UnicodeDecodeError as error:
                raise ArtifactError(str(self._path), "is not a readable GGUF file: a name is not UTF-8") from error

    def _read(self) -> tuple[dict[str, KeyEntry], list[TensorEntry]]:
        (version,) = self._unpack("I")
        if version & 0xFFFF == 0:
            raise ArtifactError(str(self._path), "is a GGUF file of a big-endian machine, which is not read")
        if version not in _VERSIONS:
            raise ArtifactError(str(self._path), f"is GGUF version {version}, and only 2 and 3 are read")
        tensor_count, key_count = self._unpack("QQ")
        entries: dict[str, KeyEntry] = {}
        for _ in range(key_count):
            self._kept.clear()
            key = self._string()
            value = self._value(*self._unpack("I"))
            entries[key] = KeyEntry(value, bytes(self._kept))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = entries["general.alignment"].value if "general.alignment" in entries else 32
        if not isinstance(alignment, int) or alignment < 1:
            raise ArtifactError(str(self._path), f"general.alignment is {alignment!r}, not a whole number from 1")
        start = -(-self._file.tell() // alignment) * alignment
        return entries, [self._tensor(start, *info) for info in infos]

    def _take(self, count: int) -> bytes:
        if count > self._size - self._file.tell():
            raise _truncated(self._path, "in its header")
        if count > _VALUE_BYTES:
            raise ArtifactError(
                str(self._path), f"is not a readable GGUF file: a value of its header has {count} bytes"
            )
        data = self._file.read(count)
        self._kept += data
        return data

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        return self._take(length).decode()

    def _value(self, kind: int) -> Any:
        """Read a value: a number, a text, a tuple of numbers or, of an array of texts, their number."""
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            of, count = self._unpack("IQ")
            if of in _SCALARS:
                size = struct.calcsize("<" + _SCALARS[of])
                return struct.unpack(f"<{count}{_SCALARS[of]}", self._take(count * size))
            if of == _STRING:
                for _ in range(count):
                    (length,) = self._unpack("Q")
                    self._take(length)
                return count
        raise ArtifactError(str(self._path), f"is not a readable GGUF file: a value has the unknown type {kind}")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._unpack("I")
        if not 1 <= dimensions <= _DIMENSIONS:
            raise ArtifactError(str(self._path), f"tensor {name[:80]!r} has {dimensions} dimensions, not 1 to 4")
        shape = self._unpack(f"{dimensions}Q")
        kind, offset = self._unpack("IQ")
        # ggml names the dimension first whose numbers are neighbours.
        return name, tuple(reversed(shape)), kind, offset

    def _tensor(self, data_start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
        try:
            tensor_type = gguf.GGMLQuantizationType(kind)
            block, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
        except (ValueError, KeyError) as error:
            raise ArtifactError(
                str(self._path), f"tensor {name} has type {kind}, which the package gguf does not know; update it"
            ) from error
        if shape[-1] % block or not all(shape):
            raise ArtifactError(str(self._path), f"tensor {name} is {tensor_type.name} {list(shape)}: no whole blocks")
        start = data_start + offset
        end = start + math.prod(shape) // block * block_bytes
        if end > self._size:
            raise _truncated(self._path, f"before the end of tensor {name}, {end - self._size} bytes short")
        return TensorEntry(name, shape, tensor_type, self._path, start, end)


def check_types(file: GgufFile) -> None:
    """Raise ArtifactError for the first tensor of a type that cannot be dequantized."""
    for tensor in {tensor.type: tensor for tensor in file.tensors.values()}.values():
        _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.type]
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), tensor.type)
        except NotImplementedError as error:
            raise ArtifactError(
                file.name, f"tensor {tensor.name} has type {tensor.type.name}, which the package gguf cannot dequantize"
            ) from error
