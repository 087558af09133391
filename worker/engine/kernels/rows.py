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

# numba compiles these functions from their bytecode, without annotations, so mypy has no types to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.engine.kernels import compilation
from worker.engine.kernels.llvm import (
    CONTRACT,
    EXP,
    F32,
    I32,
    KINDS,
    LANES,
    LARGEST_EXPONENT,
    LN2,
    LOG2_E,
    ROUNDING,
    ROUNDING_BITS,
    broadcast,
    each_vector,
    fetch_add,
    field_length,
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
    vector_type,
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


def _weight(b: Any, address: Any, index: Any, lanes: int) -> Any:
    return load_floats(b, b.add(address, b.mul(index, int64(4))), 0, lanes)


@intrinsic
def add_rows(typingctx, parameters, x, y, out, columns):
    """Compute out = x + y."""
    kind = field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        x, y, out = (_Row(b, kind, address) for address in arguments[1:4])

        def emit(index, lanes, _):
            out.store(index, b.fadd(x.load(index, lanes), y.load(index, lanes)), lanes)

        each_vector(b, arguments[4], emit)
        return context.get_dummy_value()

    return types.void(parameters, x, y, out, columns), generate


@intrinsic
def sum_squares(typingctx, parameters, x, columns):
    """Return the sum of the squares of a row."""
    kind = field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        x = _Row(b, kind, arguments[1])
        sums = {lanes: cgutils.alloca_once_value(b, vector_of(F32, 0.0, lanes)) for lanes in (LANES, 1)}
        for lanes, memory in sums.items():
            b.store(vector_of(F32, 0.0, lanes), memory)

        def emit(index, lanes, _):
            value = x.load(index, lanes)
            square = b.fmul(value, value, flags=CONTRACT)
            b.store(b.fadd(b.load(sums[lanes]), square, flags=CONTRACT), sums[lanes])

        each_vector(b, arguments[2], emit)
        return b.fadd(*(sum_lanes(b, b.load(memory), lanes) for lanes, memory in sums.items()))

    return types.float32(parameters, x, columns), generate


@intrinsic
def scale_row(typingctx, parameters, x, factor, weight, out, columns):
    """Compute out = x * factor * weight, of float32 weights."""
    kind = field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        _, x, factor, weight, out, columns = arguments
        x, out = _Row(b, kind, x), _Row(b, kind, out)

        def emit(index, lanes, _):
            scaled = b.fmul(x.load(index, lanes), broadcast(b, factor, lanes))
            out.store(index, b.fmul(scaled, _weight(b, weight, index, lanes)), lanes)

        each_vector(b, columns, emit)
        return context.get_dummy_value()

    return types.void(parameters, x, factor, weight, out, columns), generate


@intrinsic
def gate_row(typingctx, parameters, gate, up, out, columns):
    """Compute out = silu(gate) * up."""
    kind = field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        gate, up, out = (_Row(b, kind, address) for address in arguments[1:4])

        def emit(index, lanes, _):
            value = gate.load(index, lanes)
            one = vector_of(F32, 1.0, lanes)
            silu = b.fdiv(value, b.fadd(one, _exp(b, b.fsub(vector_of(F32, -0.0, lanes), value), lanes)))
            out.store(index, b.fmul(silu, up.load(index, lanes)), lanes)

        each_vector(b, arguments[4], emit)
        return context.get_dummy_value()

    return types.void(parameters, gate, up, out, columns), generate


def _exp(b: Any, x: Any, lanes: int) -> Any:
    """Return exp(x): 2 ** n times a polynomial."""
    for compare, bound in ((">", -LARGEST_EXPONENT), ("<", LARGEST_EXPONENT)):
        limit = vector_of(F32, bound, lanes)
        x = b.select(b.fcmp_ordered(compare, x, limit), x, limit)
    rounding = vector_of(F32, ROUNDING, lanes)
    shifted = b.fadd(b.fmul(x, vector_of(F32, LOG2_E, lanes)), rounding)
    n = b.fsub(shifted, rounding)
    r = x
    for part in LN2:
        r = b.fsub(r, b.fmul(n, vector_of(F32, part, lanes)), flags=CONTRACT)
    y = vector_of(F32, EXP[0], lanes)
    for factor in EXP[1:]:
        y = b.fadd(b.fmul(y, r, flags=CONTRACT), vector_of(F32, factor, lanes), flags=CONTRACT)
    y = b.fadd(b.fadd(b.fmul(b.fmul(y, r), r), r), vector_of(F32, 1.0, lanes))
    whole = b.sub(b.bitcast(shifted, vector_type(I32, lanes)), vector_of(I32, ROUNDING_BITS - 127, lanes))
    return b.fmul(y, b.bitcast(b.shl(whole, vector_of(I32, 23, lanes)), vector_type(F32, lanes)))


@intrinsic
def rotate_head(typingctx, parameters, x, cos, sin, half):
    """Rotate pairs of the first 2 * half numbers of a head, in place: number i with number half + i."""
    kind = field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        x, cos, sin = (_Row(b, kind, address) for address in arguments[1:4])
        half = arguments[4]

        def emit(index, lanes, _):
            first, second = index, b.add(index, half)
            one, other = x.load(first, lanes), x.load(second, lanes)
            turned = b.fsub(b.fmul(one, cos.load(first, lanes)), b.fmul(other, sin.load(first, lanes)))
            across = b.fadd(b.fmul(other, cos.load(second, lanes)), b.fmul(one, sin.load(second, lanes)))
            x.store(first, turned, lanes)
            x.store(second, across, lanes)

        each_vector(b, half, emit)
        return context.get_dummy_value()

    return types.void(parameters, x, cos, sin, half), generate


@intrinsic
def widen_row(typingctx, parameters, x, out, columns):
    """Convert a row to float32."""
    kind = field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        x = _Row(b, kind, arguments[1])

        def emit(index, lanes, _):
            store(b, x.load(index, lanes), b.add(arguments[2], b.mul(index, int64(4))), 0, 4)

        each_vector(b, arguments[3], emit)
        return context.get_dummy_value()

    return types.void(parameters, x, out, columns), generate


@intrinsic
def copy_bytes(typingctx, to, of, count):
    """Copy bytes that do not overlap."""

    def generate(context, b, signature, arguments):
        to, of, count = arguments
        pointer = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(b, b.inttoptr(to, pointer), b.inttoptr(of, pointer), count, int64(1))
        return context.get_dummy_value()

    return types.void(to, of, count), generate


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
    return compilation.compile_kernel(_KERNELS[name], parameters)


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
