"""Reads the quantized weights of checkpoints; artifacts/quantization.py describes the layouts, and checks them.

compressed-tensors   words of int32 hold 4 or 8 columns of a row, the first one in the lowest bits; codes and zero
                     points have an offset of half their range
awq                  words hold 8 outputs of a column, in the order 0 2 4 6 1 3 5 7 from the lowest bits
gptq                 words hold 4 or 8 columns of an output, zero points 4 or 8 outputs; the first in the lowest bits
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from artifacts.checkpoint import Checkpoint
from artifacts.quantization import Method, StoredWeight
from worker.engine.quantized.weight import QuantizedWeight, pack_codes

# The place of output i of eight in an AWQ word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)

ReadTensor = Callable[[str], Tensor]


@contextlib.contextmanager
def open_tensors(checkpoint: Checkpoint) -> Iterator[ReadTensor]:
    """Open a checkpoint's files; yields a function that reads a tensor by its name."""
    with contextlib.ExitStack() as stack:
        files: dict[Path, Any] = {}

        def read(name: str) -> Tensor:
            path, _ = checkpoint.tensors[name]
            if path not in files:
                files[path] = stack.enter_context(safetensors.safe_open(path, "pt"))
            tensor: Tensor = files[path].get_tensor(name)
            return tensor

        yield read


def read_weight(stored: StoredWeight, read: ReadTensor) -> QuantizedWeight:
    """Read a quantized weight; `read` gives a tensor by its name."""
    if stored.scheme.method is Method.COMPRESSED_TENSORS:
        return _compressed(stored, read)
    return _transposed(stored, read)


def _compressed(stored: StoredWeight, read: ReadTensor) -> QuantizedWeight:
    scheme = stored.scheme.quantization
    out_features, in_features = stored.out_features, stored.in_features
    codes = read(stored.codes)
    zeros = None if stored.zeros is None else read(stored.zeros)
    if stored.packed:
        codes = codes.contiguous().view(torch.uint8)[:, : in_features * scheme.bits // 8]
        # Pairs of 4 bits are as QuantizedWeight has them; bytes lose their offset.
        codes = codes.contiguous() if scheme.bits == 4 else (codes ^ 0x80).view(torch.int8)
        if zeros is not None:
            zeros = _fields(zeros.t(), scheme.bits)[:, :out_features].t()
            zeros = zeros if scheme.bits == 4 else zeros - 128
    scales = read(stored.scales).float()
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(out_features, 1)
    return _weight(stored, codes, scales, zeros)


def _transposed(stored: StoredWeight, read: ReadTensor) -> QuantizedWeight:
    scheme = stored.scheme
    bits = scheme.quantization.bits
    if scheme.method is Method.AWQ:
        codes, zeros = (_awq_fields(read(name)) for name in (stored.codes, stored.zeros or ""))
        codes = codes.t()
    else:
        codes = _fields(read(stored.codes).t(), bits)
        zeros = _fields(read(stored.zeros or ""), bits) + (1 if scheme.zeros_less_one else 0)
    # Eight bits are stored from 0, and held from -128.
    shift = 128 if bits == 8 else 0
    codes = pack_codes(codes) if bits == 4 else (codes - shift).to(torch.int8)
    return _weight(stored, codes, read(stored.scales).t(), zeros.t() - shift)


def _weight(stored: StoredWeight, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> QuantizedWeight:
    scheme = stored.scheme.quantization
    return QuantizedWeight(
        codes.contiguous(),
        scales.float().contiguous(),
        None if zeros is None else zeros.float().contiguous(),
        scheme.bits,
        scheme.group or stored.in_features,
    )


def _fields(words: Tensor, bits: int) -> Tensor:
    """Return the fields of int32 words [rows, words], lowest first: int32 [rows, words * 32 // bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)


def _awq_fields(words: Tensor) -> Tensor:
    fields = _fields(words, 4)
    return fields.view(len(words), -1, 8)[:, :, list(_AWQ_PLACES)].flatten(1)
