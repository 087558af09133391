"""The CPU's kernel for linear layers over codes with activations in fixed point: see fixed_tiles.py.

for each row, taken by the next free thread:  x[row] as int16, a factor for each segment
when all rows are converted, for each task (some panels), taken by the next free thread:
    for each panel, for each tile of rows:  y[row, outputs] = sums + bias, rounded once to y's dtype
"""

# numba compiles these functions from their bytecode, without annotations, so mypy has no types to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from functools import cache
from typing import Any

from numba import carray

from worker.engine.device.cpu import compilation
from worker.engine.device.cpu.counters import fetch_add, wait_for
from worker.engine.device.cpu.llvm import KINDS, kernel_part
from worker.engine.linear import fixed_rows, fixed_tiles, formats, vectors
from worker.engine.linear.fixed_rows import to_fixed
from worker.engine.linear.fixed_tiles import fixed_1, fixed_2, fixed_3, fixed_4
from worker.engine.linear.formats import FORMATS, LAYER_INTEGERS
from worker.engine.linear.vectors import PANEL, tile_rows, write_row

# Maximum rows of a tile: the sums of more do not fit AVX2's 16 registers, beside the codes of four columns.
TILE_ROWS = 4
# Counters that threads share, 64-bit integers at these byte offsets: tasks taken, threads that have begun, rows taken,
# rows converted.
COUNTERS = 4
_TASKS, _THREADS, _TAKEN, _CONVERTED = 0, 8, 16, 24

# `memory` is the rows' q; behind it are the factors of all rows, and behind those of each row the sums of its q. A tile
# fetches a part of the next panel, a 2 ** `spread`-th.
CALL_INTEGERS = f"{formats.CALL_INTEGERS} memory spread"
INTEGERS = f"{CALL_INTEGERS} {LAYER_INTEGERS} q_bytes factor_bytes sums_of_q scratch_bytes"


@cache
def compile_fixed(format_name: str, kind: str, *, zeros: bool) -> Any:
    """Compile the kernel for a format and a dtype in KINDS. Threads called with the same zeroed counters share it."""
    made_for = {"of_format": FORMATS[format_name], "of_kind": KINDS[kind], "of_zeros": 1 + zeros}
    parameters = compilation.parameter_dtype(INTEGERS.split(), [], made_for)
    return compilation.compile_kernel(_multiply, parameters, fixed_tiles, fixed_rows, vectors, formats)


def spread(rows: int) -> int:
    """Return the kernel's parameter `spread`: the logarithm of the number of tiles, rounded down."""
    return (-(-rows // TILE_ROWS)).bit_length() - 1


def scratch_floats() -> int:
    """Return the float32 of a thread's scratch: a tile's sums."""
    return TILE_ROWS * PANEL


@kernel_part()
def _tile(p, count, q, factors, weights, scales, next_weights, sums):
    if count == 1:
        fixed_1(p, q, factors, weights, scales, next_weights, sums)
    elif count == 2:
        fixed_2(p, q, factors, weights, scales, next_weights, sums)
    elif count == 3:
        fixed_3(p, q, factors, weights, scales, next_weights, sums)
    else:
        fixed_4(p, q, factors, weights, scales, next_weights, sums)


@kernel_part()
def _panel(p, at, panel, factors, sums):
    weights = at.weights + panel * at.panel_bytes
    scales = at.scales + panel * at.scale_panel
    first = panel * PANEL
    width = min(PANEL, at.outputs - first)
    # Memory gives the next panel evenly, while this one's tiles are computed: with the first tile alone it is too slow.
    next_weights = weights + at.panel_bytes
    row = 0
    while row < at.rows:
        count = tile_rows(at.rows - row, TILE_ROWS)
        of_rows = factors + row * at.factor_bytes
        _tile(p, count, at.memory + row * at.q_bytes, of_rows, weights, scales, next_weights, sums)
        next_weights += at.panel_bytes >> at.spread
        for index in range(count):
            y = at.y + (row + index) * at.y_bytes + first * at.y_size
            write_row(p, sums + index * PANEL * 4, at.bias + first * 4, y, width)
        row += count


def _multiply(p):
    at = carray(p, 1)[0]
    counters = at.counters
    factors = at.memory + at.rows * at.q_bytes
    sums = at.scratch + fetch_add(counters + _THREADS) * at.scratch_bytes
    while True:
        row = fetch_add(counters + _TAKEN)
        if row >= at.rows:
            break
        to_fixed(p, at.x + row * at.x_bytes, at.memory + row * at.q_bytes, factors + row * at.factor_bytes)
        fetch_add(counters + _CONVERTED)
    wait_for(counters + _CONVERTED, at.rows)
    while True:
        task = fetch_add(counters + _TASKS)
        if task >= at.tasks:
            return
        for panel in range(at.panels * task // at.tasks, at.panels * (task + 1) // at.tasks):
            _panel(p, at, panel, factors, sums)
