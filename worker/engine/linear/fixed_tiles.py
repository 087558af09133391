"""Tiles of the fixed-point kernel: activations as int16 with a factor for each segment of columns. See vectors.py.

    x[row, column] ≈ factor[row, segment] * q[row, column]          q = round(x / factor), at most 32767 in size
    sums[row, output] = sum over segments of factor * scale[output] * (sum of q * code - zero * sum of q)

The inner sums are of integers, and exact. fixed_rows.py makes q, its factors and its sums.
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
    F32,
    I16,
    I32,
    I64,
    broadcast,
    field_length,
    int64,
    load,
    load_field,
    load_floats,
    vector_of,
    vector_type,
)
from worker.engine.linear.vectors import (
    AHEAD,
    HALVES,
    TileSums,
    V,
    each_segment,
    fetch,
    load_pairs,
    unit_sizes,
)

_SUM_OF_PAIRS = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
# Minimum columns that one pass of a tile's loop adds; a segment has whole passes, see COLUMNS_STEP. With AVX-512 as few
# as can be: of several sums in a row LLVM makes two instructions each, where the processor has one.
_PASS_COLUMNS = 8 if V == 8 else 2


def _multiplying(rows: int) -> Any:
    @intrinsic
    def multiply(typingctx, parameters, q, factors, weights, scales, next_weights, sums):
        """Write sums float32 [rows, PANEL] for rows in fixed point and a panel.

        `factors` are the factors of the rows' segments, and behind them, at `sums_of_q`, the sums of their q. Meanwhile
        this tile's part of the next panel's weights is fetched to the cache, from `next_weights` on.
        """
        code = field_length(parameters, "of_format")
        has_zeros = field_length(parameters, "of_zeros") > 1

        def generate(context, b, signature, arguments):
            p, q, factors, weights, scales, next_weights, sums = arguments
            unit, unit_bytes = unit_sizes(code)
            columns = max(unit, _PASS_COLUMNS)
            names = ("q_bytes", "factor_bytes", "sums_of_q", "scale_step", "spread")
            q_bytes, factor_bytes, sums_of_q, step, spread = (load_field(b, parameters, p, name) for name in names)
            to_zeros = b.sub(*(load_field(b, parameters, p, name) for name in ("zeros", "scales")))
            lines = [b.add(q, b.mul(q_bytes, int64(row))) for row in range(rows)]
            of_rows = [b.add(factors, b.mul(factor_bytes, int64(row))) for row in range(rows)]
            totals, parts = TileSums(b, F32, rows), TileSums(b, I32, rows)
            totals.clear()
            with each_segment(b, parameters, p) as (first, stop, number):
                of_segment, of_factor = b.mul(number, step), b.mul(number, int64(4))
                places = [b.add(of_row, of_factor) for of_row in of_rows]
                scale = b.add(scales, of_segment)
                zero = _load_pairs(b, b.add(scale, to_zeros)) if has_zeros else None
                _begin(b, zero, [b.add(place, sums_of_q) for place in places], parts)
                with cgutils.for_range_slice(b, first, stop, int64(columns), I64) as (index, _):
                    place, offset = b.mul(index, int64(unit_bytes // unit)), b.mul(index, int64(2))
                    address, size = b.add(weights, place), unit_bytes * columns // unit
                    fetch(b, address, AHEAD, size)
                    fetch(b, b.add(next_weights, b.lshr(place, spread)), 0, size)
                    _add_columns(b, code, columns, address, [b.add(line, offset) for line in lines], parts)
                _end(b, parts, totals, places, scale)
            totals.write(sums)
            return context.get_dummy_value()

        return types.void(parameters, q, factors, weights, scales, next_weights, sums), generate

    return multiply


def _begin(b: Any, zeros: list[Any] | None, sums_of_q: list[Any], sums: TileSums) -> None:
    """Set the sums to - zero * sum of q, with one product of pairs: see ZERO_STEP."""
    if zeros is None:
        sums.clear()
        return
    for row, address in enumerate(sums_of_q):
        both = _broadcast_pair(b, load(b, address, 0, I32, 4))
        for half in HALVES:
            sums[row, half] = _sum_of_pairs(b, both, zeros[half])


def _add_columns(b: Any, code: int, columns: int, address: Any, lines: list[Any], sums: TileSums) -> None:
    """Add the products of some columns with the rows' int16 at `lines`, pair by pair."""
    unit, unit_bytes = unit_sizes(code)
    for first in range(0, columns, unit):
        halves = [load_pairs(b, code, b.add(address, int64(first // unit * unit_bytes)), half) for half in HALVES]
        for pair in range(unit // 2):
            for row, line in enumerate(lines):
                both = _broadcast_pair(b, load(b, line, 2 * first + 4 * pair, I32, 4))
                for half in HALVES:
                    sums[row, half] = _add_sum_of_pairs(b, sums[row, half], both, halves[half][pair])


def _end(b: Any, parts: TileSums, totals: TileSums, factors: list[Any], scales: Any) -> None:
    """Add the sums of a segment to the totals; `factors` are the addresses of the rows' factors."""
    for row, half in parts.places:
        value = b.fmul(b.sitofp(parts[row, half], vector_type(F32, V)), load_floats(b, scales, V * half, V))
        factor = broadcast(b, load(b, factors[row], 0, F32, 4), V)
        totals[row, half] = b.fadd(totals[row, half], b.fmul(value, factor, flags=CONTRACT), flags=CONTRACT)


def _add_sum_of_pairs(b: Any, total: Any, one: Any, other: Any) -> Any:
    """Add the products of int16 neighbours to int32 [V], in the order of the code.

    LLVM left to itself adds up products first, whose number does not fit the registers.
    """
    added = b.add(total, _sum_of_pairs(b, one, other))
    return b.call(ir.InlineAsm(ir.FunctionType(added.type, [added.type]), "", "=v,0", side_effect=True), [added])


def _load_pairs(b: Any, address: Any) -> list[Any]:
    return [load(b, address, 4 * V * half, vector_type(I16, 2 * V), 4) for half in HALVES]


def _sum_of_pairs(b: Any, one: Any, other: Any) -> Any:
    """Multiply int16 and add neighbours: int32 [V]."""
    pairs = vector_type(I16, 2 * V)
    kind = ir.FunctionType(vector_type(I32, V), [pairs, pairs])
    return b.call(cgutils.get_or_insert_function(b.module, kind, _SUM_OF_PAIRS[V]), [one, other])


def _broadcast_pair(b: Any, pair: Any) -> Any:
    """Return a vector with two int16, given as a word, side by side in every place."""
    first = b.insert_element(ir.Constant(vector_type(I32, V), ir.Undefined), pair, ir.Constant(I32, 0))
    words = b.shuffle_vector(first, first, vector_of(I32, 0, V))
    return b.bitcast(words, vector_type(I16, 2 * V))


fixed_1, fixed_2, fixed_3, fixed_4 = (_multiplying(rows) for rows in range(1, 5))
