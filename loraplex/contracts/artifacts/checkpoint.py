"""Read checkpoints without torch: the headers of safetensors files, and samples of a base model's weights.

A header may be hostile: every bound is checked before it is used. A file (https://github.com/huggingface/safetensors)
has 8 bytes little-endian header length, a JSON header, and the tensors' bytes, which must cover the rest of the file
exactly, without holes or overlaps.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from loraplex.contracts.artifacts import ArtifactError, parse_object

# Bytes of an element, by dtype.
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
# Size of the header's length; maximum size of a header, which is read into memory; maximum dimensions of a tensor.
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 16 * 1024 * 1024
# Maximum size of an adapter's header: some 25,000 tensors.
ADAPTER_HEADER_BYTES = 4 * 1024 * 1024
# Minimum bytes of a header for each of its values, names included: a tensor has eight of them.
_VALUE_BYTES = 16
_MAX_DIMENSIONS = 8
_SINGLE = "model.safetensors"
CONFIG_FILE = "config.json"
# The package that reads text models beside towers for images or sound; the field of such a config that names the class
# of the whole. Fields and beginnings of tensors' names tell such a checkpoint.
TOWERS, TOWER_FIELD = "loraplex.checkpoints.text_models", "loraplex_tower_of"
_TOWER_FIELDS = {"text_config", "vision_config", "audio_config"}
_TOWER_NAMES = ("language_model.", "model.language_model.", "model.text_model.", "visual.")
_INDEX = "model.safetensors.index.json"
# Size in bytes of each of the three samples of a tensor.
_SAMPLE_BYTES = 4096
# Formats of integers by dtype, and the maximum bytes of a tensor that is read whole. No numpy, which every process of
# the cluster would import for them.
_INTEGERS = {"I32": struct.Struct("<i"), "I64": struct.Struct("<q")}
_SMALL_TENSOR_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor whose bytes are file[start:end], row-major, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: str | Path, max_bytes: int = _MAX_HEADER_BYTES) -> dict[str, TensorInfo]:
    """Return the file's tensors by name, in the order of their bytes. Raises ArtifactError with the file's name."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(_LENGTH_BYTES)
            if len(prefix) < _LENGTH_BYTES:
                raise ArtifactError(path.name, "is not a safetensors file: shorter than 8 bytes")
            header_bytes = int.from_bytes(prefix, "little")
            if header_bytes > min(max_bytes, file_bytes - _LENGTH_BYTES):
                raise ArtifactError(
                    path.name,
                    f"is not a safetensors file: its header would be {header_bytes} bytes long, "
                    f"the file has {file_bytes} and a header at most {max_bytes}",
                )
            text = file.read(header_bytes)
            if not text.startswith(b"{"):
                raise ArtifactError(path.name, "is not a safetensors file: its header is not a JSON object")
    except OSError as error:
        raise ArtifactError(path.name, f"cannot be read: {error.strerror}") from error
    header = parse_object(text, path.name, values=max_bytes // _VALUE_BYTES)
    return _parse(path.name, header, data_start=_LENGTH_BYTES + header_bytes, file_bytes=file_bytes)


def _parse(subject: str, header: dict[str, Any], data_start: int, file_bytes: int) -> dict[str, TensorInfo]:
    header.pop("__metadata__", None)
    tensors = {name: _tensor(subject, name, entry, data_start) for name, entry in header.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    position = data_start
    for name, tensor in ordered.items():
        if tensor.start != position:
            raise ArtifactError(subject, f"tensor {name} leaves a hole or overlaps another")
        position = tensor.end
    if position != file_bytes:
        what = "is cut short" if position > file_bytes else "has bytes that belong to no tensor"
        raise ArtifactError(subject, f"{what}: {file_bytes} bytes, its header describes {position}")
    return ordered


def _tensor(subject: str, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ArtifactError(subject, f"tensor {name} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ArtifactError(subject, f"tensor {name} has the unknown dtype {dtype!r}")
    if not _sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ArtifactError(subject, f"tensor {name} has a shape that is none")
    if not _sizes(offsets) or len(offsets) != 2:
        raise ArtifactError(subject, f"tensor {name} has data_offsets that are not two positions")
    start, end = offsets
    if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ArtifactError(subject, f"tensor {name} has {end - start} bytes, which is not what {dtype} {shape} takes")
    return TensorInfo(dtype, tuple(shape), data_start + start, data_start + end)


def _sizes(value: Any) -> bool:
    """Return whether a value is a list of whole numbers from 0 that a file can hold."""
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's tensors by name, each with the file that holds it; `stored_names` are other names in the files."""

    tensors: Mapping[str, tuple[Path, TensorInfo]]
    stored_names: Mapping[str, str] = field(default_factory=dict)

    def fingerprint(self) -> list[list[Any]]:
        """Return name, dtype, shape, size and a hash of sampled bytes of every tensor, whatever file holds it.

        Raises ArtifactError when a file cannot be read.
        """
        samples: dict[str, str] = {}
        by_file: dict[Path, list[str]] = {}
        for name, (path, _) in self.tensors.items():
            by_file.setdefault(path, []).append(name)
        for path, names in by_file.items():
            try:
                with open(path, "rb") as file:
                    samples |= {name: _sample(file.fileno(), self.tensors[name][1]) for name in names}
            except OSError as error:
                raise ArtifactError(path.name, f"cannot be read: {error.strerror}") from error
        return [
            [name, tensor.dtype, list(tensor.shape), tensor.end - tensor.start, samples[name]]
            for name, (_, tensor) in sorted(self.tensors.items())
        ]

    def integers(self, name: str) -> tuple[int, ...]:
        """Return the numbers of a small tensor of integers. Raises ArtifactError naming it."""
        if name not in self.tensors:
            raise ArtifactError("model", f"tensor {name} is missing")
        path, tensor = self.tensors[name]
        if tensor.dtype not in _INTEGERS or tensor.end - tensor.start > _SMALL_TENSOR_BYTES:
            raise ArtifactError("model", f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, not a few integers")
        try:
            with open(path, "rb") as file:
                data = os.pread(file.fileno(), tensor.end - tensor.start, tensor.start)
        except OSError as error:
            raise ArtifactError(path.name, f"cannot be read: {error.strerror}") from error
        return tuple(number for (number,) in _INTEGERS[tensor.dtype].iter_unpack(data))


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json, of a checkpoint with towers that of its text model. Raises ArtifactError."""
    config = parse_object(read_small_file(directory / CONFIG_FILE), CONFIG_FILE)
    return config if _TOWER_FIELDS.isdisjoint(config) else import_module(TOWERS).text_config(config, directory)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of the safetensors file, or of all files that the index names. Raises ArtifactError.

    Of a checkpoint with towers only the text model's tensors are returned, as in a checkpoint of it alone.
    """
    tensors = _read_tensors(directory)
    towers = any(name.startswith(_TOWER_NAMES) for name in tensors)
    return import_module(TOWERS).text_checkpoint(tensors) if towers else Checkpoint(tensors)


def _read_tensors(directory: Path) -> dict[str, tuple[Path, TensorInfo]]:
    if (directory / _SINGLE).is_file():
        path = directory / _SINGLE
        return {name: (path, tensor) for name, tensor in read_header(path).items()}
    if not (directory / _INDEX).is_file():
        raise ArtifactError(str(directory), f"has neither {_SINGLE} nor {_INDEX}; only safetensors weights are served")
    index = parse_object(read_small_file(directory / _INDEX), _INDEX)
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not all(_is_file_name(name) for name in placed.values()):
        raise ArtifactError(_INDEX, "weight_map is not an object of tensor names and file names")
    headers = {name: read_header(directory / name) for name in sorted(set(placed.values()))}
    for tensor, name in placed.items():
        if tensor not in headers[name]:
            raise ArtifactError(name, f"lacks tensor {tensor}, which {_INDEX} places there")
    return {tensor: (directory / name, headers[name][tensor]) for tensor, name in placed.items()}


def read_small_file(path: Path) -> bytes:
    """Read a whole file. Raises ArtifactError with its name."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(path.name, f"cannot be read: {error.strerror}") from error


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and "/" not in name


def _sample(descriptor: int, tensor: TensorInfo) -> str:
    """Hash the tensor's first, middle and last bytes."""
    size = tensor.end - tensor.start
    middle = tensor.start + max(0, (size - _SAMPLE_BYTES) // 2)
    last = max(tensor.start, tensor.end - _SAMPLE_BYTES)
    sha256 = hashlib.sha256()
    for start in (tensor.start, middle, last):
        sha256.update(os.pread(descriptor, min(_SAMPLE_BYTES, size), start))
    return sha256.hexdigest()
