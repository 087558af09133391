"""Vector instructions of the kernels between linear layers: a row at a time, so that no row's bits depend on others.

Sums are float32; results are rounded once to the kernel's dtype. See worker.engine.device.cpu.llvm.
"""

# numba compiles these functions from their bytecode, without annotations, so mypy has no types to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.engine.device.cpu.llvm import (
    CONTRACT,
    EXP,
    F32,
    I32,
    LANES,
    LARGEST_EXPONENT,
    LN2,
    LOG2_E,
    ROUNDING,
    ROUNDING_BITS,
    broadcast,
    each_vector,
    field_length,
    int64,
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
