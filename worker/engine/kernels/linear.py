"""The CPU's kernel for linear layers: x float32 [rows, columns] times a weight in panels, read once, in its own format.

    for each task (some panels), taken by the next free thread:
        for each panel:
            few rows:  for each tile of rows, sums += x * columns, unpacked in registers
            more:      the panel as float32 in this thread's scratch, then the same from there
            y[row, outputs] = sums + bias, rounded once to y's dtype

    sums[row, output] = sum over segments of scale[output] * sum over columns of x[row, column] * (code - zero)

Both ways add the same numbers in the same order, column by column, whatever the number of rows: a row's bits do not
depend on it. fixed_linear.py is for activations in fixed point.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import carray
from numba.core import cgutils

from worker.engine.kernels import weight_vectors
from worker.engine.kernels.compilation import Kernel, compile_kernel
from worker.engine.kernels.llvm import (
    CONTRACT,
    F32,
    I64,
    KINDS,
    Parameters,
    broadcast,
    cases,
    emits,
    fetch_add,
    int64,
    kernel_part,
    load,
    load_floats,
    store,
)
from worker.engine.kernels.weight_vectors import (
    AHEAD,
    CALL_INTEGERS,
    FLOAT32,
    FORMATS,
    HALVES,
    LAYER_INTEGERS,
    PANEL,
    TileSums,
    V,
    column_of,
    each_segment,
    fetch,
    keep_order,
    load_half,
    tile_rows,
    unit_sizes,
    write_row,
)

# Maximum rows of a tile: the sums of more do not fit AVX2's 16 registers, beside what codes are unpacked in.
TILE_ROWS = 6
_PACKED_TILE_ROWS = 4


@emits()
def multiply_codes(b, p, count, x, weights, scales, zeros, sums):
    """Write sums float32 [count, PANEL] for rows of x float32 and a panel, which is unpacked in registers."""
    for rows in cases(b, count, range(1, _PACKED_TILE_ROWS + 1)):
        _multiply_rows(b, p, rows, False, x, weights, scales, zeros, sums)


@emits()
def multiply_unpacked(b, p, count, x, weights, scales, zeros, sums):
    """Write the same for a panel that `unpack` wrote."""
    for rows in cases(b, count, range(1, TILE_ROWS + 1)):
        _multiply_rows(b, p, rows, True, x, weights, scales, zeros, sums)


def _multiply_rows(
    b: Any, p: Parameters, rows: int, unpacked: bool, x: Any, weights: Any, scales: Any, zeros: Any, sums: Any
) -> None:
    code = FLOAT32 if unpacked else p.constant("of_format")
    has_zeros = p.constant("of_zeros") > 1 and not unpacked
    has_scales = p.constant("of_scales") > 1
    unit, unit_bytes = unit_sizes(code)
    x_bytes, step = (p.load(name) for name in ("x_bytes", "scale_step"))
    lines = [b.add(x, b.mul(x_bytes, int64(row))) for row in range(rows)]
    totals, parts = TileSums(b, F32, rows), TileSums(b, F32, rows)
    totals.clear()
    with each_segment(b, p) as (first, stop, number):
        parts.clear()
        of_segment = b.mul(number, step)
        zero_points = _load_panel(b, b.add(zeros, of_segment)) if has_zeros else [None for _ in HALVES]
        with cgutils.for_range_slice(b, first, stop, int64(unit), I64) as (index, _):
            address = b.add(weights, b.mul(b.udiv(index, int64(unit)), int64(unit_bytes)))
            if not unpacked:
                fetch(b, address, AHEAD, unit_bytes)
            offset = b.mul(index, int64(4))
            _add_unit(b, code, address, zero_points, [b.add(line, offset) for line in lines], parts)
        scale = _load_panel(b, b.add(scales, of_segment)) if has_scales else None
        for row, half in totals.places:
            part = parts[row, half]
            if scale is not None:
                part = b.fmul(part, scale[half], flags=CONTRACT)
            totals[row, half] = b.fadd(totals[row, half], part, flags=CONTRACT)
    totals.write(sums)


def _load_panel(b: Any, address: Any) -> list[Any]:
    return [load_floats(b, address, V * half, V) for half in HALVES]


def _add_unit(b: Any, code: int, address: Any, zeros: list[Any], lines: list[Any], parts: TileSums) -> None:
    """Add a unit's products with the rows' float32 at `lines`, column by column."""
    halves = [load_half(b, code, address, half) for half in HALVES]
    for column in range(unit_sizes(code)[0]):
        if column:
            keep_order(b)
        vectors = [column_of(b, code, half, column, zero) for half, zero in zip(halves, zeros, strict=True)]
        for row, line in enumerate(lines):
            factor = broadcast(b, load(b, line, 4 * column, F32, 4), V)
            for half in HALVES:
                product = b.fmul(factor, vectors[half], flags=CONTRACT)
                parts[row, half] = b.fadd(parts[row, half], product, flags=CONTRACT)


@emits()
def unpack(b, p, weights, zeros, out):
    """Write the codes of a panel, less their zeros, as float32 [columns, PANEL]."""
    format_code = p.constant("of_format")
    has_zeros = p.constant("of_zeros") > 1

    unit, unit_bytes = unit_sizes(format_code)
    step = p.load("scale_step")
    with each_segment(b, p) as (first, stop, number):
        of_segment = b.mul(number, step)
        with cgutils.for_range_slice(b, first, stop, int64(unit), I64) as (index, _):
            address = b.add(weights, b.mul(b.udiv(index, int64(unit)), int64(unit_bytes)))
            fetch(b, address, AHEAD, unit_bytes)
            line = b.add(out, b.mul(index, int64(4 * PANEL)))
            for half in HALVES:
                zero = load_floats(b, b.add(zeros, of_segment), V * half, V) if has_zeros else None
                loaded = load_half(b, format_code, address, half)
                for column in range(unit):
                    value = column_of(b, format_code, loaded, column, zero)
                    store(b, value, line, 4 * (PANEL * column + V * half), 4)


# Counters that threads share, 64-bit integers at these byte offsets: tasks taken, threads that have begun.
COUNTERS = 2
_TASKS, _THREADS = 0, 8

# With up to `direct` rows codes are unpacked in registers, with more to scratch, if `unpacks`; `scratch` has
# `scratch_bytes` for each thread.
INTEGERS = f"{CALL_INTEGERS} {LAYER_INTEGERS} direct unpacks scratch_bytes"


@cache
def compile_linear(format_name: str, kind: str, *, scales: bool, zeros: bool) -> Kernel:
    """Compile the kernel for a format and y's dtype in KINDS. Threads called with the same zeroed counters share it."""
    constants = {"of_format": FORMATS[format_name], "of_kind": KINDS[kind]}
    optional = {"of_scales": 1 + scales, "of_zeros": 1 + zeros}
    return compile_kernel(_multiply, constants | optional, INTEGERS, emitting=weight_vectors)


def scratch_floats(columns: int) -> int:
    """Return the float32 of a thread's scratch: a tile's sums, and a panel."""
    return (TILE_ROWS + columns) * PANEL


@kernel_part()
def _panel(p, at, panel, scratch):
    weights = at.weights + panel * at.panel_bytes
    scales = at.scales + panel * at.scale_panel
    zeros = at.zeros + panel * at.scale_panel
    first = panel * PANEL
    width = min(PANEL, at.outputs - first)
    direct = at.rows <= at.direct
    most = _PACKED_TILE_ROWS if direct else TILE_ROWS
    if not direct and at.unpacks:
        unpacked = scratch + TILE_ROWS * PANEL * 4
        unpack(p, weights, zeros, unpacked)
        weights = unpacked
    row = 0
    while row < at.rows:
        count = tile_rows(at.rows - row, most)
        x = at.x + row * at.x_bytes
        if direct:
            multiply_codes(p, count, x, weights, scales, zeros, scratch)
        else:
            multiply_unpacked(p, count, x, weights, scales, zeros, scratch)
        for index in range(count):
            y = at.y + (row + index) * at.y_bytes + first * at.y_size
            write_row(p, scratch + index * PANEL * 4, at.bias + first * 4, y, width)
        row += count


def _multiply(p):
    at = carray(p, 1)[0]
    scratch = at.scratch + fetch_add(at.counters + _THREADS) * at.scratch_bytes
    while True:
        task = fetch_add(at.counters + _TASKS)
        if task >= at.tasks:
            return
        for panel in range(at.panels * task // at.tasks, at.panels * (task + 1) // at.tasks):
            _panel(p, at, panel, scratch)
