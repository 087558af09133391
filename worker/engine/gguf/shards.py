"""Writes safetensors files tensor by tensor, so that memory holds one of them: names and shapes are known before.

A file is the length of its header in 8 bytes, the header in JSON (a name's dtype, shape, first and last byte), and the
tensors' bytes, one after the other. safetensors' own save_file takes all tensors of a file at once.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Maximum bytes of a file with more than one tensor.
SHARD_BYTES = 2 << 30
_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}
# safetensors wants the header's length to be a multiple of it.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Return its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(
    out: Path, plans: Sequence[TensorPlan], read: Callable[[TensorPlan], Tensor], progress: Callable[[int, int], None]
) -> None:
    """Write the tensors that `read` gives to files of at most SHARD_BYTES, and an index of several. Raises OSError."""
    shards = _divide(plans)
    # A model of a single file has its usual name, and no index.
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else ["model.safetensors"]
    done = 0
    for name, shard in zip(names, shards, strict=True):
        with open(out / name, "wb") as file:
            file.write(_header(shard))
            for plan in shard:
                file.write(read(plan).contiguous().view(-1).view(torch.uint8).numpy().data)
                done += 1
                progress(done, len(plans))
    if len(shards) > 1:
        placed = {plan.name: name for name, shard in zip(names, shards, strict=True) for plan in shard}
        index = {"metadata": {"total_size": sum(plan.size for plan in plans)}, "weight_map": placed}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _divide(plans: Sequence[TensorPlan]) -> list[list[TensorPlan]]:
    shards: list[list[TensorPlan]] = [[]]
    size = 0
    for plan in plans:
        if shards[-1] and size + plan.size > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(plan)
        size += plan.size
    return shards


def _header(shard: Sequence[TensorPlan]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for plan in shard:
        end = start + plan.size
        header[plan.name] = {"dtype": _NAMES[plan.dtype], "shape": plan.shape, "data_offsets": (start, end)}
        start = end
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % _ALIGNMENT)
    return struct.pack("<Q", len(data)) + data
