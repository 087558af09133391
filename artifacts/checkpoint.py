"""Read a transformers checkpoint without torch: the headers of its safetensors files, and samples of its weights."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts.errors import ArtifactError
from artifacts.json_object import parse_object
from artifacts.safetensors_header import TensorInfo, read_header

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Size in bytes of each of the three samples of a tensor.
_SAMPLE_BYTES = 4096
# Formats of integers by dtype, and the maximum bytes of a tensor that is read whole. No numpy, which every process of
# the cluster would import for them.
_INTEGERS = {"I32": struct.Struct("<i"), "I64": struct.Struct("<q")}
_SMALL_TENSOR_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's tensors by name, each with the file that holds it."""

    tensors: Mapping[str, tuple[Path, TensorInfo]]

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


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of the safetensors file, or of all files that the index names. Raises ArtifactError."""
    if (directory / _SINGLE).is_file():
        path = directory / _SINGLE
        return Checkpoint({name: (path, tensor) for name, tensor in read_header(path).items()})
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
    return Checkpoint({tensor: (directory / name, headers[name][tensor]) for tensor, name in placed.items()})


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
