"""Panels of codes unpacked for products of floats: first the codes, and later, from their sums, zeros and scales.

Zeros are subtracted from codes, or, of 4 bits that are multiplied as bfloat16, from the sums of a segment: zero * sum
of x. That takes fewer instructions, and the sums of the segments of each row of x, which are computed first.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils

from loraplex.kernels.llvm import (
    CONTRACT,
    F32,
    I64,
    KINDS,
    KernelArgs,
    broadcast,
    emits,
    int64,
    kernel_part,
    load,
    load_floats,
    store,
    sum_lanes,
    vector_of,
    vector_type,
)
from loraplex.kernels.weight_vectors import (
    AHEAD,
    FLOATS,
    HALVES,
    INT4,
    PANEL,
    V,
    column_of,
    each_segment,
    each_vector_of,
    fetch,
    load_half,
    pair_of,
    unit_sizes,
)


def _zeros_are_last(p: KernelArgs) -> bool:
    """Tell whether zeros are subtracted from sums, not from codes."""
    return p.constant("of_format") == INT4 and p.constant("of_products") != FLOATS and p.constant("of_zeros") > 1


@emits(types.int64)
def sums_rows(b, p):
    """Return whether rows are summed up first, segment by segment."""
    return int64(int(_zeros_are_last(p)))


@emits()
def sum_row(b, p, x, sums):
    """Write the sum of each segment of a row of x, in bfloat16."""
    with each_segment(b, p) as (first, stop, number):
        total = cgutils.alloca_once(b, vector_type(F32, V))
        b.store(vector_of(F32, 0.0, V), total)
        with each_vector_of(b, KINDS["bfloat16"], x, first, stop) as (value, _):
            b.store(b.fadd(b.load(total), value), total)
        store(b, sum_lanes(b, b.load(total), V), b.add(sums, b.mul(number, int64(4))), 0, 4)


def _less_zeros(b: Any, part: Any, zeros: Any, x_sum: Any) -> Any:
    """Subtract zeros * the sum of a row's segment, at the address `x_sum`."""
    factor = broadcast(b, load(b, x_sum, 0, F32, 4), V)
    return b.fsub(part, b.fmul(zeros, factor, flags=CONTRACT), flags=CONTRACT)


def panel_floats(b: Any, address: Any) -> list[Any]:
    """Load a number for each output of a panel, by halves."""
    return [load_floats(b, address, V * half, V) for half in HALVES]


@emits()
def _unpack_segment(b, p, weights, zeros, out, begin, end):
    """Write the codes of columns [begin, end) of a panel, less the zeros of all of them, in the products' format."""
    code, pairs = p.constant("of_format"), p.constant("of_products") != FLOATS
    has_zeros = p.constant("of_zeros") > 1 and not _zeros_are_last(p)
    zero_points = panel_floats(b, zeros) if has_zeros else [None for _ in HALVES]
    unit, unit_bytes = unit_sizes(code)
    with cgutils.for_range_slice(b, begin, end, int64(unit), I64) as (index, _):
        address = b.add(weights, b.mul(b.udiv(index, int64(unit)), int64(unit_bytes)))
        fetch(b, address, AHEAD, unit_bytes)
        line = b.add(out, b.mul(b.sub(index, begin), int64((2 if pairs else 4) * PANEL)))
        for half, zero in zip(HALVES, zero_points, strict=True):
            loaded = load_half(b, code, address, half)
            for column in range(0, unit, 2 if pairs else 1):
                if pairs:
                    value = pair_of(b, code, loaded, column // 2, zero)
                else:
                    value = column_of(b, code, loaded, column, zero)
                store(b, value, line, 4 * (PANEL * (column // 2 if pairs else column) + V * half), 4)


@kernel_part()
def unpack(p, at, weights, zeros, out, begin, end):
    """Write the codes of columns [begin, end) of a panel in the products' format, less zeros that are not last."""
    while begin < end:
        segment = begin // at.segment
        stop = min(end, (segment + 1) * at.segment) if at.scale_step else end
        _unpack_segment(p, weights, zeros + segment * at.scale_step, out, begin, stop)
        out += (stop - begin) * unpacked_line(p)
        begin = stop


@emits(types.int64)
def unpacked_line(b, p):
    """Return the bytes of a column of an unpacked panel."""
    return int64((2 if p.constant("of_products") != FLOATS else 4) * PANEL)


@emits()
def add_scaled(b, p, rows, parts, x_sums, scales, zeros, sums):
    """Add the sums of a segment, less its zeros if these are last, times its scales, to all sums [rows, PANEL]."""
    has_scales, zeros_last = p.constant("of_scales") > 1, _zeros_are_last(p)
    sum_bytes = p.load("sum_bytes")
    with cgutils.for_range(b, rows) as loop:
        offset = b.mul(loop.index, int64(4 * PANEL))
        part, total = b.add(parts, offset), b.add(sums, offset)
        for half in HALVES:
            value = load_floats(b, part, V * half, V)
            if zeros_last:
                x_sum = b.add(x_sums, b.mul(loop.index, sum_bytes))
                value = _less_zeros(b, value, load_floats(b, zeros, V * half, V), x_sum)
            if has_scales:
                value = b.fmul(value, load_floats(b, scales, V * half, V), flags=CONTRACT)
            store(b, b.fadd(load_floats(b, total, V * half, V), value, flags=CONTRACT), total, 4 * V * half, 4)
