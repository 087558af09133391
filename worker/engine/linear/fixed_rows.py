"""Rows of activations as int16, with a factor for each segment of columns: what fixed_tiles.py multiplies.

    x[row, column] ≈ factor[row, segment] * q[row, column]          q = round(x / factor), at most 32767 in size

One instruction then multiplies and adds two pairs, twice what float32 does. What is lost is the rounding of x to 16
bits beside the largest of its segment; bfloat16 keeps 8.
"""

# numba compiles these functions from their bytecode, without annotations, so mypy has no types to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from worker.engine.device.cpu.llvm import (
    F32,
    I16,
    I32,
    I64,
    ROUNDING,
    ROUNDING_BITS,
    broadcast,
    field_length,
    int64,
    kind_bytes,
    load_as_float32,
    load_field,
    store,
    vector_of,
    vector_type,
)
from worker.engine.linear.formats import ZERO_STEP
from worker.engine.linear.vectors import V, each_segment

# Largest number of the fixed point.
_LARGEST = 32767.0
# A segment whose numbers are all below this counts as zeros: their inverse would not be finite.
_SMALLEST = 1e-30


@intrinsic
def to_fixed(typingctx, parameters, x, q, factors):
    """Convert a row of x, in the kernel's dtype, to q, its factors, and behind them, at `sums_of_q`, the sums of q.

    Numbers that are not finite make the factor not a number, and with it all outputs of the row.
    """
    kind = field_length(parameters, "of_kind")

    def generate(context, b, signature, arguments):
        p, x, q, factors = arguments
        sums_of_q = load_field(b, parameters, p, "sums_of_q")
        with each_segment(b, parameters, p) as (first, stop, number):
            size, check = _measure(b, kind, x, first, stop)
            total = _convert(b, kind, x, q, first, stop, b.fdiv(ir.Constant(F32, _LARGEST), size))
            at = b.add(factors, b.mul(number, int64(4)))
            store(b, b.fadd(b.fdiv(size, ir.Constant(F32, _LARGEST)), check), at, 0, 4)
            store(b, _as_pair(b, total), b.add(at, sums_of_q), 0, 4)
        return context.get_dummy_value()

    return types.void(parameters, x, q, factors), generate


def _measure(b: Any, kind: int, x: Any, first: Any, stop: Any) -> tuple[Any, Any]:
    """Return the largest size of a segment, never 0, and 0, which is not a number where one of the segment is not."""
    nothing = vector_of(F32, 0.0, V)
    largest, check = (cgutils.alloca_once_value(b, nothing) for _ in range(2))
    b.store(nothing, largest)
    b.store(nothing, check)
    with _each_vector(b, kind, x, first, stop) as (value, _):
        size = b.bitcast(b.and_(b.bitcast(value, vector_type(I32, V)), vector_of(I32, 0x7FFFFFFF, V)), value.type)
        before = b.load(largest)
        b.store(b.select(b.fcmp_ordered(">", size, before), size, before), largest)
        b.store(b.fadd(b.load(check), b.fmul(value, nothing)), check)
    greatest = _reduce(b, "fmax", b.load(largest), F32)
    some = b.fcmp_ordered(">", greatest, ir.Constant(F32, _SMALLEST))
    zero = _reduce(b, "fadd", b.load(check), F32, ir.Constant(F32, 0.0))
    return b.select(some, greatest, ir.Constant(F32, _LARGEST)), zero


def _convert(b: Any, kind: int, x: Any, q: Any, first: Any, stop: Any, inverse: Any) -> Any:
    """Write q of a segment; return its sum."""
    total = cgutils.alloca_once_value(b, vector_of(I32, 0, V))
    b.store(vector_of(I32, 0, V), total)
    factor = broadcast(b, inverse, V)
    with _each_vector(b, kind, x, first, stop) as (value, index):
        bits = b.bitcast(b.fadd(b.fmul(value, factor), vector_of(F32, ROUNDING, V)), vector_type(I32, V))
        whole = b.sub(bits, vector_of(I32, ROUNDING_BITS, V))
        b.store(b.add(b.load(total), whole), total)
        store(b, b.trunc(whole, vector_type(I16, V)), b.add(q, b.mul(index, int64(2))), 0, 2)
    return _reduce(b, "add", b.load(total), I32)


def _as_pair(b: Any, total: Any) -> Any:
    """Return a sum of q as two int16 in a word: total = ZERO_STEP * the upper + the lower one."""
    low = b.and_(total, ir.Constant(I32, ZERO_STEP - 1))
    high = b.ashr(total, ir.Constant(I32, ZERO_STEP.bit_length() - 1))
    return b.or_(low, b.shl(high, ir.Constant(I32, 16)))


@contextmanager
def _each_vector(b: Any, kind: int, x: Any, first: Any, stop: Any) -> Iterator[tuple[Any, Any]]:
    """Emit a loop over V columns at a time; gives their float32 and the index of the first."""
    with cgutils.for_range_slice(b, first, stop, int64(V), I64) as (index, _):
        yield load_as_float32(b, kind, b.add(x, b.mul(index, int64(kind_bytes(kind)))), 0, V), index


def _reduce(b: Any, how: str, vector: Any, of: Any, *start: Any) -> Any:
    """Return the lanes of a vector, reduced by LLVM's operation `how`."""
    name = f"llvm.vector.reduce.{how}.v{V}{'f32' if of is F32 else 'i32'}"
    kind = ir.FunctionType(of, [*(one.type for one in start), vector.type])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), [*start, vector])
