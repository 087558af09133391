"""The CPU's kernel for linear layers: x float32 [rows, columns] times a weight in panels, read once, in its own format.

    for each task (some panels), taken by the next free thread:
        for each panel:
            few rows:  for each tile of rows, sums += x * columns, unpacked in registers                       tiles.py
            more:      the panel as float32 in this thread's scratch, then the same from there
            y[row, outputs] = sums + bias, rounded once to y's dtype

Both ways add the same numbers in the same order. fixed_kernel.py is for activations in fixed point.
"""

# numba compiles these functions from their bytecode, without annotations, so mypy has no types to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from functools import cache
from typing import Any

from numba import carray

from worker.engine.device.cpu import compilation
from worker.engine.device.cpu.counters import fetch_add
from worker.engine.device.cpu.llvm import KINDS, kernel_part
from worker.engine.linear import formats, tiles, vectors
from worker.engine.linear.formats import CALL_INTEGERS, FORMATS, LAYER_INTEGERS
from worker.engine.linear.tiles import (
    multiply_1,
    multiply_2,
    multiply_3,
    multiply_4,
    unpack,
    unpacked_1,
    unpacked_2,
    unpacked_3,
    unpacked_4,
    unpacked_5,
    unpacked_6,
)
from worker.engine.linear.vectors import PANEL, tile_rows, write_row

# Maximum rows of a tile: the sums of more do not fit AVX2's 16 registers, beside what codes are unpacked in.
TILE_ROWS = 6
_PACKED_TILE_ROWS = 4
# Counters that threads share, 64-bit integers at these byte offsets: tasks taken, threads that have begun.
COUNTERS = 2
_TASKS, _THREADS = 0, 8

# With up to `direct` rows codes are unpacked in registers, with more to scratch, if `unpacks`; `scratch` has
# `scratch_bytes` for each thread.
INTEGERS = f"{CALL_INTEGERS} {LAYER_INTEGERS} direct unpacks scratch_bytes"


@cache
def compile_linear(format_name: str, kind: str, *, scales: bool, zeros: bool) -> Any:
    """Compile the kernel for a format and y's dtype in KINDS. Threads called with the same zeroed counters share it."""
    made_for = {
        "of_format": FORMATS[format_name],
        "of_kind": KINDS[kind],
        "of_scales": 1 + scales,
        "of_zeros": 1 + zeros,
    }
    parameters = compilation.parameter_dtype(INTEGERS.split(), [], made_for)
    return compilation.compile_kernel(_multiply, parameters, tiles, vectors, formats)


def scratch_floats(columns: int) -> int:
    """Return the float32 of a thread's scratch: a tile's sums, and a panel."""
    return (TILE_ROWS + columns) * PANEL


@kernel_part()
def _packed_tile(p, count, x, weights, scales, zeros, sums):
    if count == 1:
        multiply_1(p, x, weights, scales, zeros, sums)
    elif count == 2:
        multiply_2(p, x, weights, scales, zeros, sums)
    elif count == 3:
        multiply_3(p, x, weights, scales, zeros, sums)
    else:
        multiply_4(p, x, weights, scales, zeros, sums)


@kernel_part()
def _unpacked_tile(p, count, x, weights, scales, zeros, sums):
    if count == 1:
        unpacked_1(p, x, weights, scales, zeros, sums)
    elif count == 2:
        unpacked_2(p, x, weights, scales, zeros, sums)
    elif count == 3:
        unpacked_3(p, x, weights, scales, zeros, sums)
    elif count == 4:
        unpacked_4(p, x, weights, scales, zeros, sums)
    elif count == 5:
        unpacked_5(p, x, weights, scales, zeros, sums)
    else:
        unpacked_6(p, x, weights, scales, zeros, sums)


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
            _packed_tile(p, count, x, weights, scales, zeros, scratch)
        else:
            _unpacked_tile(p, count, x, weights, scales, zeros, scratch)
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
