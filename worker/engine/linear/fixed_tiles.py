"""Tiles of the fixed-point kernel: activations as int16 with a factor for each segment of columns. See vectors.py.

    x[row, column] ≈ factor[row, segment] * q[row, column]          q = round(x / factor), at most 32767 in size
    sums[row, output] = sum over segments of factor * scale[output] * (sum of q * code - zero * sum of q)

The inner sums are of integers, and exact. fixed_rows.py makes q and its factors.
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
    F32,
    I32,
    I64,
    broadcast,
    field_length,
    int64,
    load,
    load_field,
    load_floats,
    vector_type,
)
from worker.engine.linear.vectors import (
    CONTRACT,
    HALVES,
    I16,
    TileSums,
    V,
    each_segment,
    fetch_ahead,
    load_pairs,
    unit_sizes,
    vector_of,
)

_SUM_OF_PAIRS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


def _sum_of_pairs(b: Any, one: Any, other: Any) -> Any:
    """Multiply int16 and add neighbours: int32 [V]."""
    pairs = vector_type(I16, 2 * V)
    kind = ir.FunctionType(vector_type(I32, V), [pairs, pairs])
    return b.call(cgutils.get_or_insert_function(b.module, kind, _SUM_OF_PAIRS[V]), [one, other])


def _multiplying(rows: int) -> Any:
    @intrinsic
    def multiply(typingctx, parameters, q, factors, weights, scales, zeros, sums):
        """Write sums float32 [rows, PANEL] for rows in fixed point and a panel.

        `factors` are the factors of the rows' segments, and behind them, at `sums_of_x`, the sums of their q.
        """
        code = field_length(parameters, "of_format")
        has_zeros = field_length(parameters, "of_zeros") > 1

        def generate(context, b, signature, arguments):
            p, q, factors, weights, scales, zeros, sums = arguments
            unit, unit_bytes = unit_sizes(code)
            names = ("q_bytes", "factor_bytes", "sums_of_x", "scale_step")
            q_bytes, factor_bytes, sums_of_x, step = (load_field(b, parameters, p, name) for name in names)
            lines = [b.add(q, b.mul(q_bytes, int64(row))) for row in range(rows)]
            of_rows = [b.add(factors, b.mul(factor_bytes, int64(row))) for row in range(rows)]
            totals, parts = TileSums(b, F32, rows), TileSums(b, I32, rows)
            totals.clear()
            with each_segment(b, parameters, p) as (first, stop, number):
                parts.clear()
                with cgutils.for_range_slice(b, first, stop, int64(unit), I64) as (index, _):
                    address = b.add(weights, b.mul(b.udiv(index, int64(unit)), int64(unit_bytes)))
                    fetch_ahead(b, address, unit_bytes)
                    offset = b.mul(index, int64(2))
                    _add_unit(b, code, address, [b.add(line, offset) for line in lines], parts)
                of_segment, of_factor = b.mul(number, step), b.mul(number, int64(4))
                zero = b.add(zeros, of_segment) if has_zeros else None
                places = [b.add(of_row, of_factor) for of_row in of_rows]
                _add_segment(b, parts, totals, places, sums_of_x, b.add(scales, of_segment), zero)
            totals.write(sums)
            return context.get_dummy_value()

        return types.void(parameters, q, factors, weights, scales, zeros, sums), generate

    return multiply


def _add_unit(b: Any, code: int, address: Any, lines: list[Any], parts: TileSums) -> None:
    """Add a unit's products with the rows' int16 at `lines`, pair by pair."""
    halves = [load_pairs(b, code, address, half) for half in HALVES]
    for pair in range(unit_sizes(code)[0] // 2):
        for row, line in enumerate(lines):
            both = _broadcast_pair(b, load(b, line, 4 * pair, I32, 4))
            for half in HALVES:
                parts[row, half] = b.add(parts[row, half], _sum_of_pairs(b, both, halves[half][pair]))


def _add_segment(
    b: Any, parts: TileSums, totals: TileSums, factors: list[Any], sums_of_x: Any, scales: Any, zeros: Any
) -> None:
    """Add the integer sums of a segment to the totals; `factors` are the addresses of the rows' factors."""
    for row, half in totals.places:
        value = b.sitofp(parts[row, half], vector_type(F32, V))
        if zeros is not None:
            sum_of_x = broadcast(b, load(b, b.add(factors[row], sums_of_x), 0, F32, 4), V)
            shift = b.fmul(load_floats(b, zeros, V * half, V), sum_of_x, flags=CONTRACT)
            value = b.fsub(value, shift, flags=CONTRACT)
        value = b.fmul(value, load_floats(b, scales, V * half, V))
        factor = broadcast(b, load(b, factors[row], 0, F32, 4), V)
        totals[row, half] = b.fadd(totals[row, half], b.fmul(value, factor, flags=CONTRACT), flags=CONTRACT)


def _broadcast_pair(b: Any, pair: Any) -> Any:
    """Return a vector with two int16, given as a word, side by side in every place."""
    first = b.insert_element(ir.Constant(vector_type(I32, V), ir.Undefined), pair, ir.Constant(I32, 0))
    words = b.shuffle_vector(first, first, vector_of(I32, 0, V))
    return b.bitcast(words, vector_type(I16, 2 * V))


fixed_1, fixed_2, fixed_3, fixed_4, fixed_5 = (_multiplying(rows) for rows in range(1, 6))
