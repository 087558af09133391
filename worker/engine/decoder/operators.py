"""Calls of the kernels between linear layers, over rows [rows, columns] whose numbers lie side by side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.engine.decoder.kernels import INTEGERS, REALS, compile_rows
from worker.engine.device.cpu import threads
from worker.engine.device.dtypes import dtype_name

# Minimum number of numbers that threads share: fewer take less time than the sharing.
_SHARED = 16_384


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalization: x / sqrt(mean of x ** 2 + epsilon) * weight [columns], float32."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class Heads:
    """The queries, keys and values of a row, side by side: heads * key_dim, kv_heads * key_dim, kv_heads * value_dim.

    Queries and keys of each head are normalized where there are norms, which have one epsilon.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Rotation:
    """The cosines and sines of each row [rows, columns]; the first `columns` numbers of a head are rotated."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Slots:
    """The slot of each row [rows] in a layer's keys and values."""

    slots: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A compiled kernel, and the layout of its parameters."""

    address: int
    layout: Struct
    compiled: Any


class RowOperators:
    """The operators for rows of one dtype; from one thread. A kernel is compiled at its first call."""

    def __init__(self, dtype: torch.dtype, shared: int = _SHARED) -> None:
        """Let threads share what has at least `shared` numbers."""
        self.dtype = dtype
        self._shared = shared
        self.counter = np.zeros(1, np.int64)
        self._at = self.counter.ctypes.data

    def norm(self, x: Tensor, norm: Norm, out: Tensor) -> None:
        """Normalize rows x into `out`."""
        self._norm(x, None, x, norm, out)

    def add_norm(self, x: Tensor, y: Tensor, sums: Tensor, norm: Norm, out: Tensor) -> None:
        """Write x + y into `sums`, and these normalized into `out`."""
        self._norm(x, y, sums, norm, out)

    def _norm(self, x: Tensor, y: Tensor | None, sums: Tensor, norm: Norm, out: Tensor) -> None:
        size = x.element_size()
        other = (0, 0) if y is None else (y.data_ptr(), y.stride(0) * size)
        self._run(
            "norm",
            out,
            *(x.data_ptr(), x.stride(0) * size, *other, sums.data_ptr(), sums.stride(0) * size),
            *(norm.weight.data_ptr(), out.data_ptr(), out.stride(0) * size, norm.epsilon),
        )

    def gate(self, x: Tensor, out: Tensor) -> None:
        """Multiply silu of the first half of rows x by the second half into `out`, which has half the columns."""
        size, columns = x.element_size(), out.shape[1]
        first = x.data_ptr()
        self._run("gate", out, first, first + columns * size, x.stride(0) * size, out.data_ptr(), out.stride(0) * size)

    def rotate(self, x: Tensor, heads: Heads, rotation: Rotation | None, to: Slots | None = None) -> None:
        """Normalize and rotate the queries and keys of rows x, in place; then write keys and values to their slots."""
        size = x.element_size()
        turn = (0, 0, 0, 0)
        if rotation is not None:
            cos = rotation.cos
            turn = cos.data_ptr(), rotation.sin.data_ptr(), cos.stride(0) * size, cos.shape[1] // 2
        norms = [0 if norm is None else norm.weight.data_ptr() for norm in (heads.query_norm, heads.key_norm)]
        places = (0, 0, 0) if to is None else (to.slots.data_ptr(), to.keys.data_ptr(), to.values.data_ptr())
        norm = heads.query_norm or heads.key_norm
        self._run(
            "rotate",
            x,
            *(x.data_ptr(), x.stride(0) * size, heads.heads, heads.kv_heads, heads.key_dim, heads.value_dim),
            *(*turn, *norms, *places, size, norm.epsilon if norm else 0.0),
        )

    def add(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        """Add rows x and y into `out`."""
        size = x.element_size()
        places = [part for rows in (x, y, out) for part in (rows.data_ptr(), rows.stride(0) * size)]
        self._run("add", out, *places)

    def widen(self, x: Tensor, out: Tensor) -> None:
        """Convert rows x to float32 into `out`."""
        self._run("widen", out, x.data_ptr(), x.stride(0) * x.element_size(), out.data_ptr(), out.stride(0) * 4)

    def _run(self, name: str, over: Tensor, *places: float) -> None:
        rows, columns = over.shape
        kernel = _kernel(name, dtype_name(self.dtype))
        parameters = kernel.layout.pack(rows, columns, self._at, *places)
        self.counter[0] = 0
        (threads.run_on_all_threads if rows * columns >= self._shared else threads.run_on_this_thread)(
            kernel.address, parameters
        )


@cache
def _kernel(name: str, kind: str) -> _Kernel:
    compiled = compile_rows(name, kind)
    layout = Struct(f"={len(INTEGERS[name].split())}q{len(REALS.get(name, ()))}f")
    return _Kernel(compiled.address, layout, compiled)
