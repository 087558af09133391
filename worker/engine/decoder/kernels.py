"""The CPU's kernels between linear layers. Threads called with the same zeroed counter share the rows.

norm      sums[row] = x[row] + y[row], where there is a y;  out[row] = sums[row] / rms(sums[row]) * weight
gate      out[row] = silu(gate[row]) * up[row]
rotate    queries and keys of a row: normalized where there are weights, rotated by the row's cos and sin, in place;
          then keys and values go to the row's slot, where there is a cache
add       out[row] = x[row] + y[row]
widen     out[row] = x[row] as float32

Every address, stride in bytes and count is a 64-bit integer; 0 for an address means that there is none.
"""

# numba compiles these functions from their bytecode, without annotations, so mypy has no types to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import carray

from worker.engine.decoder import vectors
from worker.engine.decoder.vectors import (
    add_rows,
    copy_bytes,
    gate_row,
    rotate_head,
    scale_row,
    sum_squares,
    widen_row,
)
from worker.engine.device.cpu import compilation
from worker.engine.device.cpu.counters import fetch_add
from worker.engine.device.cpu.llvm import KINDS, int64_pointer, kernel_part

_ROWS = "rows columns counter"
INTEGERS = {
    "norm": f"{_ROWS} x x_bytes y y_bytes sums sums_bytes weight out out_bytes",
    "gate": f"{_ROWS} gate up x_bytes out out_bytes",
    "rotate": f"{_ROWS} x x_bytes heads kv_heads key_dim value_dim cos sin cos_bytes half query_weight key_weight "
    "slots keys values size",
    "add": f"{_ROWS} x x_bytes y y_bytes out out_bytes",
    "widen": f"{_ROWS} x x_bytes out out_bytes",
}
# Float32 behind the integers.
REALS = {"norm": ["epsilon"], "rotate": ["epsilon"]}


@cache
def compile_rows(name: str, kind: str) -> Any:
    """Compile a kernel of INTEGERS for a dtype in KINDS."""
    parameters = compilation.parameter_dtype(INTEGERS[name].split(), REALS.get(name, []), {"of_kind": KINDS[kind]})
    return compilation.compile_kernel(_KERNELS[name], parameters, vectors)


@kernel_part()
def _inverse_rms(p, x, columns, epsilon):
    mean = sum_squares(p, x, columns) / np.float32(columns)
    return np.float32(1.0) / np.sqrt(mean + epsilon)


def _norm(p):
    at = carray(p, 1)[0]
    while True:
        row = fetch_add(at.counter)
        if row >= at.rows:
            return
        x = at.x + row * at.x_bytes
        if at.y:
            sums = at.sums + row * at.sums_bytes
            add_rows(p, x, at.y + row * at.y_bytes, sums, at.columns)
            x = sums
        scale_row(p, x, _inverse_rms(p, x, at.columns, at.epsilon), at.weight, at.out + row * at.out_bytes, at.columns)


def _gate(p):
    at = carray(p, 1)[0]
    while True:
        row = fetch_add(at.counter)
        if row >= at.rows:
            return
        first = row * at.x_bytes
        gate_row(p, at.gate + first, at.up + first, at.out + row * at.out_bytes, at.columns)


@kernel_part()
def _turn(p, at, row, head, weight):
    if weight:
        scale_row(p, head, _inverse_rms(p, head, at.key_dim, at.epsilon), weight, head, at.key_dim)
    if at.half:
        rotate_head(p, head, at.cos + row * at.cos_bytes, at.sin + row * at.cos_bytes, at.half)


def _rotate(p):
    at = carray(p, 1)[0]
    head_bytes = at.key_dim * at.size
    key_bytes, value_bytes = at.kv_heads * head_bytes, at.kv_heads * at.value_dim * at.size
    while True:
        row = fetch_add(at.counter)
        if row >= at.rows:
            return
        head = at.x + row * at.x_bytes
        for _ in range(at.heads):
            _turn(p, at, row, head, at.query_weight)
            head += head_bytes
        keys = head
        for _ in range(at.kv_heads):
            _turn(p, at, row, head, at.key_weight)
            head += head_bytes
        if at.keys:
            slot = carray(int64_pointer(at.slots), (at.rows,))[row]
            copy_bytes(at.keys + slot * key_bytes, keys, key_bytes)
            copy_bytes(at.values + slot * value_bytes, head, value_bytes)


def _add(p):
    at = carray(p, 1)[0]
    while True:
        row = fetch_add(at.counter)
        if row >= at.rows:
            return
        add_rows(p, at.x + row * at.x_bytes, at.y + row * at.y_bytes, at.out + row * at.out_bytes, at.columns)


def _widen(p):
    at = carray(p, 1)[0]
    while True:
        row = fetch_add(at.counter)
        if row >= at.rows:
            return
        widen_row(p, at.x + row * at.x_bytes, at.out + row * at.out_bytes, at.columns)


_KERNELS: dict[str, Callable[..., None]] = {
    "norm": _norm,
    "gate": _gate,
    "rotate": _rotate,
    "add": _add,
    "widen": _widen,
}
