"""Tensors of a safetensors file as views of the mapped file: only the pages that are used are read."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from artifacts.checkpoint import TensorInfo

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def map_tensors(path: Path, header: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """Return views of the file by tensor name; each keeps it mapped. All dtypes must be in DTYPES. Raises OSError."""
    with open(path, "rb") as file:
        # torch requires writable memory. ACCESS_COPY gives it, and nothing is written to the file.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _view(mapped, info) for name, info in header.items()}


def _view(mapped: mmap.mmap, info: TensorInfo) -> Tensor:
    dtype, count = DTYPES[info.dtype], math.prod(info.shape)
    if not count:
        return torch.empty(info.shape, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=info.start).view(info.shape)
