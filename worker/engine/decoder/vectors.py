"""Vector instructions of the kernels between linear layers: a row at a time, so that no row's bits depend on others.

Sums are float32; results are rounded once to the kernel's dtype. See worker.engine.device.cpu.llvm.
"""

# numba compiles these functions from their bytecode, without annotations, so mypy has no types to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.engine.device.cpu.llvm import (
    F32,
    I32,
    I64,
    LANES,
    broadcast,
    field_length,
    int64,
    kind_bytes,
    load_as_float32,
    load_floats,
    round_to_kind,
    store,
    sum_lanes,
    vector_type,
)

# Flags of an operation: multiply and add may be fused into one instruction, but sums are not reordered.
_CONTRACT = ("contract",)
# Largest magnitude whose exponential is computed: that of a larger one would not be a normal float32.
_LARGEST_EXPONENT = 87.0
# Adding the first to a float32 of less than 2 ** 22 in size rounds that to an integer; the bits less the second are it.
_ROUNDING, _ROUNDING_BITS = 12582912.0, 0x4B400000
# Logarithm of 2 in two parts, and a polynomial of exp(r) - 1 - r over r ** 2, from the highest power (Cephes' expf).
_LN2 = (0.693359375, -2.12194440e-4)
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


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


def _each(b: Any, columns: Any, emit: Callable[[Any, int], None]) -> None:
    """Emit a loop over whole vectors of columns, then one over single columns."""
    whole = b.and_(columns, int64(-LANES))
    for first, stop, lanes in ((int64(0), whole, LANES), (whole, columns, 1)):
        with cgutils.for_range_slice(b, first, stop, int64(lanes), I64) as (index, _):
            emit(index, lanes)


def _weight(b: Any, address: Any, index: Any, lanes: int) -> Any:
    return load_floats(b, b.add(address, b.mul(index, int64(4))), 0, lanes)


def _constant(number: float, lanes: int, of: Any = F32) -> Any:
    return ir.Constant(vector_type(of, lanes), [number] * lanes)


@intrinsic
def add_rows(typingctx, parameters, x, y, out, columns):
    """Compute out = x + y."""
    kind = field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        x, y, out = (_Row(b, kind, address) for address in arguments[1:4])

        def emit(index, lanes):
            out.store(index, b.fadd(x.load(index, lanes), y.load(index, lanes)), lanes)

        _each(b, arguments[4], emit)
        return context.get_dummy_value()

    return types.void(parameters, x, y, out, columns), generate


@intrinsic
def sum_squares(typingctx, parameters, x, columns):
    """Return the sum of the squares of a row."""
    kind = field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        x = _Row(b, kind, arguments[1])
        sums = {lanes: cgutils.alloca_once_value(b, _constant(0.0, lanes)) for lanes in (LANES, 1)}
        for lanes, memory in sums.items():
            b.store(_constant(0.0, lanes), memory)

        def emit(index, lanes):
            value = x.load(index, lanes)
            square = b.fmul(value, value, flags=_CONTRACT)
            b.store(b.fadd(b.load(sums[lanes]), square, flags=_CONTRACT), sums[lanes])

        _each(b, arguments[2], emit)
        return b.fadd(*(sum_lanes(b, b.load(memory), lanes) for lanes, memory in sums.items()))

    return types.float32(parameters, x, columns), generate


@intrinsic
def scale_row(typingctx, parameters, x, factor, weight, out, columns):
    """Compute out = x * factor * weight, of float32 weights."""
    kind = field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        _, x, factor, weight, out, columns = arguments
        x, out = _Row(b, kind, x), _Row(b, kind, out)

        def emit(index, lanes):
            scaled = b.fmul(x.load(index, lanes), broadcast(b, factor, lanes))
            out.store(index, b.fmul(scaled, _weight(b, weight, index, lanes)), lanes)

        _each(b, columns, emit)
        return context.get_dummy_value()

    return types.void(parameters, x, factor, weight, out, columns), generate


@intrinsic
def gate_row(typingctx, parameters, gate, up, out, columns):
    """Compute out = silu(gate) * up."""
    kind = field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        gate, up, out = (_Row(b, kind, address) for address in arguments[1:4])

        def emit(index, lanes):
            value = gate.load(index, lanes)
            one = _constant(1.0, lanes)
            silu = b.fdiv(value, b.fadd(one, _exp(b, b.fsub(_constant(-0.0, lanes), value), lanes)))
            out.store(index, b.fmul(silu, up.load(index, lanes)), lanes)

        _each(b, arguments[4], emit)
        return context.get_dummy_value()

    return types.void(parameters, gate, up, out, columns), generate


def _exp(b: Any, x: Any, lanes: int) -> Any:
    """Return exp(x): 2 ** n times a polynomial."""
    for compare, bound in ((">", -_LARGEST_EXPONENT), ("<", _LARGEST_EXPONENT)):
        limit = _constant(bound, lanes)
        x = b.select(b.fcmp_ordered(compare, x, limit), x, limit)
    rounding = _constant(_ROUNDING, lanes)
    shifted = b.fadd(b.fmul(x, _constant(1.4426950408889634, lanes)), rounding)
    n = b.fsub(shifted, rounding)
    r = x
    for part in _LN2:
        r = b.fsub(r, b.fmul(n, _constant(part, lanes)), flags=_CONTRACT)
    y = _constant(_EXP[0], lanes)
    for factor in _EXP[1:]:
        y = b.fadd(b.fmul(y, r, flags=_CONTRACT), _constant(factor, lanes), flags=_CONTRACT)
    y = b.fadd(b.fadd(b.fmul(b.fmul(y, r), r), r), _constant(1.0, lanes))
    whole = b.sub(b.bitcast(shifted, vector_type(I32, lanes)), _constant(_ROUNDING_BITS - 127, lanes, I32))
    return b.fmul(y, b.bitcast(b.shl(whole, _constant(23, lanes, I32)), vector_type(F32, lanes)))


@intrinsic
def rotate_head(typingctx, parameters, x, cos, sin, half):
    """Rotate pairs of the first 2 * half numbers of a head, in place: number i with number half + i."""
    kind = field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        x, cos, sin = (_Row(b, kind, address) for address in arguments[1:4])
        half = arguments[4]

        def emit(index, lanes):
            first, second = index, b.add(index, half)
            one, other = x.load(first, lanes), x.load(second, lanes)
            turned = b.fsub(b.fmul(one, cos.load(first, lanes)), b.fmul(other, sin.load(first, lanes)))
            across = b.fadd(b.fmul(other, cos.load(second, lanes)), b.fmul(one, sin.load(second, lanes)))
            x.store(first, turned, lanes)
            x.store(second, across, lanes)

        _each(b, half, emit)
        return context.get_dummy_value()

    return types.void(parameters, x, cos, sin, half), generate


@intrinsic
def widen_row(typingctx, parameters, x, out, columns):
    """Convert a row to float32."""
    kind = field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        x = _Row(b, kind, arguments[1])

        def emit(index, lanes):
            store(b, x.load(index, lanes), b.add(arguments[2], b.mul(index, int64(4))), 0, 4)

        _each(b, arguments[3], emit)
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
