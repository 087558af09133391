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

from numba import carray, njit

from worker.engine.device.cpu import compilation
from worker.engine.device.cpu.llvm import KINDS, fetch_add, load_counter, yield_thread
from worker.engine.linear import fixed_rows, fixed_tiles, formats, vectors
from worker.engine.linear.fixed_rows import to_fixed
from worker.engine.linear.fixed_tiles import fixed_1, fixed_2, fixed_3, fixed_4, fixed_5
from worker.engine.linear.formats import FORMATS
from worker.engine.linear.vectors import PANEL, tile_rows, write_row

# Maximum rows of a tile.
TILE_ROWS = 5
# Counters that threads share, 64-bit integers at these byte offsets: tasks taken, threads that have begun, rows taken,
# rows converted.
COUNTERS = 4
_TASKS, _THREADS, _TAKEN, _CONVERTED = 0, 8, 16, 24
# Number of times that a thread spins for the last row before it yields its core: some tens of microseconds.
_SPINS = 20_000

# See kernel.py; `q` and `factors` are memory for the rows in fixed point.
INTEGERS = (
    "x x_bytes rows columns segment weights panel_bytes panels outputs scales zeros scale_panel scale_step "
    "bias y y_bytes y_size q q_bytes factors factor_bytes sums_of_x scratch scratch_bytes counters tasks"
)


@cache
def compile_fixed(format_name: str, kind: str, *, zeros: bool) -> Any:
    """Compile the kernel for a format and a dtype in KINDS. Threads called with the same zeroed counters share it."""
    made_for = {"of_format": FORMATS[format_name], "of_kind": KINDS[kind], "of_zeros": 1 + zeros}
    parameters = compilation.parameter_dtype(INTEGERS.split(), [], made_for)
    return compilation.compile_kernel(_multiply, parameters, fixed_tiles, fixed_rows, vectors, formats)


def scratch_floats() -> int:
    """Return the float32 of a thread's scratch: a tile's sums."""
    return TILE_ROWS * PANEL


@njit(error_model="numpy")
def _tile(p, count, q, factors, weights, scales, zeros, sums):
    if count == 1:
        fixed_1(p, q, factors, weights, scales, zeros, sums)
    elif count == 2:
        fixed_2(p, q, factors, weights, scales, zeros, sums)
    elif count == 3:
        fixed_3(p, q, factors, weights, scales, zeros, sums)
    elif count == 4:
        fixed_4(p, q, factors, weights, scales, zeros, sums)
    else:
        fixed_5(p, q, factors, weights, scales, zeros, sums)


@njit(error_model="numpy")
def _panel(p, at, panel, sums):
    weights = at.weights + panel * at.panel_bytes
    scales = at.scales + panel * at.scale_panel
    zeros = at.zeros + panel * at.scale_panel
    first = panel * PANEL
    width = min(PANEL, at.outputs - first)
    row = 0
    while row < at.rows:
        count = tile_rows(at.rows - row, TILE_ROWS)
        factors = at.factors + row * at.factor_bytes
        _tile(p, count, at.q + row * at.q_bytes, factors, weights, scales, zeros, sums)
        for index in range(count):
            y = at.y + (row + index) * at.y_bytes + first * at.y_size
            write_row(p, sums + index * PANEL * 4, at.bias + first * 4, y, width)
        row += count


def _multiply(p):
    at = carray(p, 1)[0]
    counters = at.counters
    sums = at.scratch + fetch_add(counters + _THREADS) * at.scratch_bytes
    while True:
        row = fetch_add(counters + _TAKEN)
        if row >= at.rows:
            break
        to_fixed(p, at.x + row * at.x_bytes, at.q + row * at.q_bytes, at.factors + row * at.factor_bytes)
        fetch_add(counters + _CONVERTED)
    # Other threads may still convert: a short wait, unless the system has taken a thread's core.
    spins = 0
    while load_counter(counters + _CONVERTED) < at.rows:
        spins += 1
        if spins > _SPINS:
            yield_thread()
    while True:
        task = fetch_add(counters + _TASKS)
        if task >= at.tasks:
            return
        for panel in range(at.panels * task // at.tasks, at.panels * (task + 1) // at.tasks):
            _panel(p, at, panel, sums)
