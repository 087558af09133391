"""The CPU's kernels between linear layers. Threads called with the same zeroed counter share the rows.

norm      sums[row] = x[row] + y[row], where there is a y;  out[row] = sums[row] / rms(sums[row]) * weight
gate      out[row] = silu(gate[row]) * up[row]
rotate    queries and keys of a row: normalized where there are weights, rotated by the row's cos and sin, in place;
          then keys and values go to the row's slot, where there is a cache
add       out[row] = x[row] + y[row]
widen     out[row] = x[row] as float32

A row is computed at a time, so that no row's bits depend on others. Sums are float32; results are rounded once to the
kernel's dtype. Every address, stride in bytes and count is a 64-bit integer; 0 for an address means that there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from loraplex.kernels.compilation import Kernel, compile_kernel
from loraplex.kernels.llvm import (
    CONTRACT,
    F32,
    KINDS,
    LANES,
    KernelArgs,
    broadcast,
    each_vector,
    emits,
    exponential,
    fetch_add,
    int64,
    int64_pointer,
    kernel_part,
    kind_bytes,
    load_as_float32,
    load_floats,
    round_to_kind,
    store,
    sum_lanes,
    vector_of,
)


class _Row:
    """The numbers of a row in the kernel's dtype, at an address."""

    def __init__(self, b: Any, kind: int, address: Any) -> None:
        self._b, self._kind, self._address = b, kind, address

    def load(self, index: Any, lanes: int) -> Any:
        """Load `lanes` numbers as float32."""
        return load_as_float32(self._b, self._kind, self._at(index), 0, lanes)

    def store(self, index: Any, wide: Any, lanes: int) -> None:
        """Round `lanes` float32 to the dtype and store them."""
        store(self._b, round_to_kind(self._b, self._kind, wide, lanes), self._at(index), 0, kind_bytes(self._kind))

    def _at(self, index: Any) -> Any:
        return self._b.add(self._address, self._b.mul(index, int64(kind_bytes(self._kind))))


def _each(b: Any, p: KernelArgs, columns: Any, emit: Callable[..., None], *addresses: Any) -> None:
    """Emit loops over the columns of rows in the kernel's dtype: emit(index, lanes, row at each address)."""
    rows = [_Row(b, p.constant("of_kind"), address) for address in addresses]
    each_vector(b, columns, lambda index, lanes, _: emit(index, lanes, *rows))


@emits()
def add_rows(b, p, x, y, out, columns):
    """Compute out = x + y."""

    def emit(index, lanes, x, y, out):
        out.store(index, b.fadd(x.load(index, lanes), y.load(index, lanes)), lanes)

    _each(b, p, columns, emit, x, y, out)


@emits(types.float32)
def sum_squares(b, p, x, columns):
    """Return the sum of the squares of a row."""
    sums = {lanes: cgutils.alloca_once_value(b, vector_of(F32, 0.0, lanes)) for lanes in (LANES, 1)}
    for lanes, memory in sums.items():
        b.store(vector_of(F32, 0.0, lanes), memory)

    def emit(index, lanes, x):
        value = x.load(index, lanes)
        square = b.fmul(value, value, flags=CONTRACT)
        b.store(b.fadd(b.load(sums[lanes]), square, flags=CONTRACT), sums[lanes])

    _each(b, p, columns, emit, x)
    return b.fadd(*(sum_lanes(b, b.load(memory), lanes) for lanes, memory in sums.items()))


@emits()
def scale_row(b, p, x, factor, weight, out, columns):
    """Compute out = x * factor * weight, of float32 weights."""

    def emit(index, lanes, x, out):
        scaled = b.fmul(x.load(index, lanes), broadcast(b, factor, lanes))
        weights = load_floats(b, b.add(weight, b.mul(index, int64(4))), 0, lanes)
        out.store(index, b.fmul(scaled, weights), lanes)

    _each(b, p, columns, emit, x, out)


@emits()
def gate_row(b, p, gate, up, out, columns):
    """Compute out = silu(gate) * up."""

    def emit(index, lanes, gate, up, out):
        value = gate.load(index, lanes)
        one = vector_of(F32, 1.0, lanes)
        silu = b.fdiv(value, b.fadd(one, exponential(b, b.fsub(vector_of(F32, -0.0, lanes), value), lanes)))
        out.store(index, b.fmul(silu, up.load(index, lanes)), lanes)

    _each(b, p, columns, emit, gate, up, out)


@emits()
def rotate_head(b, p, x, cos, sin, half):
    """Rotate pairs of the first 2 * half numbers of a head, in place: number i with number half + i."""

    def emit(index, lanes, x, cos, sin):
        first, second = index, b.add(index, half)
        one, other = x.load(first, lanes), x.load(second, lanes)
        turned = b.fsub(b.fmul(one, cos.load(first, lanes)), b.fmul(other, sin.load(first, lanes)))
        across = b.fadd(b.fmul(other, cos.load(second, lanes)), b.fmul(one, sin.load(second, lanes)))
        x.store(first, turned, lanes)
        x.store(second, across, lanes)

    _each(b, p, half, emit, x, cos, sin)


@emits()
def widen_row(b, p, x, out, columns):
    """Convert a row to float32."""

    def emit(index, lanes, x):
        store(b, x.load(index, lanes), b.add(out, b.mul(index, int64(4))), 0, 4)

    _each(b, p, columns, emit, x)


@emits()
def copy_bytes(b, to, of, count):
    """Copy bytes that do not overlap."""
    pointer = ir.IntType(8).as_pointer()
    cgutils.raw_memcpy(b, b.inttoptr(to, pointer), b.inttoptr(of, pointer), count, int64(1))


# Functions, integers and float32 of the kernels by name.
_KERNELS: dict[str, tuple[Callable[..., None], str, str]] = {}


def _kernel(integers: str, reals: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a kernel with these parameters, behind those of all."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        _KERNELS[function.__name__.removeprefix("_")] = function, f"rows columns counter {integers}", reals
        return function

    return add


@cache
def compile_rows(name: str, kind: str) -> Kernel:
    """Compile a kernel of this name for a dtype in KINDS."""
    function, integers, reals = _KERNELS[name]
    return compile_kernel(function, {"of_kind": KINDS[kind]}, integers, reals)


@kernel_part()
def _inverse_rms(p, x, columns, epsilon):
    mean = sum_squares(p, x, columns) / np.float32(columns)
    return np.float32(1.0) / np.sqrt(mean + epsilon)


@_kernel("x x_bytes y y_bytes sums sums_bytes weight out out_bytes", "epsilon")
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


@_kernel("gate up x_bytes out out_bytes")
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


@_kernel(
    "x x_bytes heads kv_heads key_dim value_dim cos sin cos_bytes half query_weight key_weight slots keys values size",
    "epsilon",
)
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


@_kernel("x x_bytes y y_bytes out out_bytes")
def _add(p):
    at = carray(p, 1)[0]
    while True:
        row = fetch_add(at.counter)
        if row >= at.rows:
            return
        add_rows(p, at.x + row * at.x_bytes, at.y + row * at.y_bytes, at.out + row * at.out_bytes, at.columns)


@_kernel("x x_bytes out out_bytes")
def _widen(p):
    at = carray(p, 1)[0]
    while True:
        row = fetch_add(at.counter)
        if row >= at.rows:
            return
        widen_row(p, at.x + row * at.x_bytes, at.out + row * at.out_bytes, at.columns)
