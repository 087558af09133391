"""The CPU's kernel for linear layers: rows of x times a weight in panels, read once, in its own format.

    for each task (some panels), taken by the next free thread:
        few rows:  for each tile of rows and each panel, sums += x * columns, unpacked in registers
        more:      the panels in the products' own format in this thread's scratch, then the same from there
        y[row, outputs] = sums + bias, rounded once to y's dtype

    sums[row, output] = sum over segments of scale[output] * sum over columns of x[row, column] * (code - zero)

Products are of float32, of pairs of bfloat16 columns (vdpbf16ps), or of tiles of bfloat16 (AMX, see tiles.py), as the
processor has them; codes are not multiplied as pairs: fixed_linear.py, with activations in fixed point, is faster.
bfloat16 holds codes, less their zeros, exactly (unpacking.py). Both ways add the same numbers in the same order,
whatever the number of rows: a row's bits do not depend on it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import carray
from numba.core import cgutils

from loraplex.kernels import tiles, unpacking, weight_vectors
from loraplex.kernels.compilation import Kernel, compile_kernel
from loraplex.kernels.llvm import (
    CONTRACT,
    F32,
    I32,
    I64,
    KINDS,
    KernelArgs,
    broadcast,
    cases,
    emits,
    fetch_add,
    int64,
    kernel_part,
    load,
    store,
    vector_of,
    wait_for,
)
from loraplex.kernels.tiles import (
    add_products,
    begin_sums,
    configure,
    copy_columns,
    read_sums,
    release,
    uses_tiles,
    write_sums,
)
from loraplex.kernels.unpacking import add_scaled, panel_floats, sum_row, sums_rows, unpack
from loraplex.kernels.weight_vectors import (
    AHEAD,
    BFLOAT16,
    EMULATED,
    FLOAT32,
    FLOATS,
    FORMATS,
    HALVES,
    LAYER_INTEGERS,
    PAIRS,
    PANEL,
    TILES,
    TileSums,
    V,
    column_of,
    dot_pairs,
    each_segment,
    fetch,
    keep_order,
    load_half,
    tile_rows,
    unit_sizes,
    write_row,
)

# Maximum rows of a tile by products, where these are not AMX's: so many sums fit 16 registers of AVX2, or 32 of
# AVX-512; and those of one that unpacks codes, which takes registers too.
_ROWS, _UNPACKING_ROWS = {FLOATS: 6, PAIRS: 12}, {FLOATS: 4}
# Maximum rows for which panels are unpacked in registers, by products and format: measured, others unpack them first.
_DIRECT_ROWS: dict[int, dict[str, int]] = {
    FLOATS: {"float32": 12, "bfloat16": 12, "int8": 8, "int4": 8},
    TILES: {"int8": tiles.ROWS, "int4": tiles.ROWS},
    EMULATED: {"int8": tiles.ROWS, "int4": tiles.ROWS},
}
# Bytes of panels that a tile of rows passes before the next tile does: they stay in a core's second-level cache.
_PASSED_BYTES = 512 * 1024
# Bytes ahead of its use at which a weight is fetched for tiles: two of their products of columns.
_TILES_AHEAD = 4096
# Columns that one pass of the loop over unpacked pairs takes: each column is a few instructions.
_PAIRS_STEP = 8


@emits()
def multiply_codes(b, p, count, x, weights, scales, zeros, sums):
    """Write sums float32 [count, PANEL] for rows of x and a panel, which is unpacked in registers."""
    for rows in cases(b, count, range(1, _UNPACKING_ROWS.get(p.constant("of_products"), 0) + 1)):
        _multiply_rows(b, p, rows, False, x, weights, scales, zeros, sums)


@emits()
def multiply_unpacked(b, p, count, x, weights, scales, zeros, sums):
    """Write the same for a panel that `unpack` wrote, or whose format is that of the products."""
    for rows in cases(b, count, range(1, _ROWS.get(p.constant("of_products"), 0) + 1)):
        _multiply_rows(b, p, rows, True, x, weights, scales, zeros, sums)


def _multiply_rows(
    b: Any,
    p: KernelArgs,
    rows: int,
    unpacked: bool,
    x: Any,
    weights: Any,
    scales: Any,
    zeros: Any,
    sums: Any,
) -> None:
    pairs = p.constant("of_products") != FLOATS
    code = (BFLOAT16 if pairs else FLOAT32) if unpacked else p.constant("of_format")
    has_zeros = p.constant("of_zeros") > 1 and not unpacked
    has_scales = p.constant("of_scales") > 1
    unit, unit_bytes = unit_sizes(code)
    step = max(unit, _PAIRS_STEP) if pairs else unit
    x_bytes, scale_step = map(p.load, ("x_bytes", "scale_step"))
    lines = [b.add(x, b.mul(x_bytes, int64(row))) for row in range(rows)]
    totals, parts = TileSums(b, F32, rows), TileSums(b, F32, rows)
    totals.clear()
    with each_segment(b, p) as (first, stop, number):
        parts.clear()
        of_segment = b.mul(number, scale_step)
        zero_points = panel_floats(b, b.add(zeros, of_segment)) if has_zeros else [None for _ in HALVES]
        with cgutils.for_range_slice(b, first, stop, int64(step), I64) as (index, _):
            address = b.add(weights, b.mul(b.udiv(index, int64(unit)), int64(unit_bytes)))
            if not unpacked or pairs:
                fetch(b, address, AHEAD, step // unit * unit_bytes)
            offset = b.mul(index, int64(2 if pairs else 4))
            of_rows = [b.add(line, offset) for line in lines]
            for at in range(0, step, unit):
                here = b.add(address, int64(at // unit * unit_bytes))
                if pairs:
                    _add_pair(b, here, [b.add(line, int64(2 * at)) for line in of_rows], parts)
                else:
                    _add_unit(b, code, here, zero_points, of_rows, parts)
        scale = panel_floats(b, b.add(scales, of_segment)) if has_scales else None
        for row, half in totals.places:
            part = parts[row, half]
            if scale is not None:
                part = b.fmul(part, scale[half], flags=CONTRACT)
            totals[row, half] = b.fadd(totals[row, half], part, flags=CONTRACT)
    totals.write(sums)


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


def _add_pair(b: Any, address: Any, lines: list[Any], parts: TileSums) -> None:
    """Add the products of two columns of a panel and of the rows, all bfloat16."""
    words = [load_half(b, BFLOAT16, address, half)[0] for half in HALVES]
    for row, line in enumerate(lines):
        of_row = broadcast(b, load(b, line, 0, I32, 4), V)
        for half in HALVES:
            parts[row, half] = dot_pairs(b, parts[row, half], of_row, words[half])


@emits()
def fetch_columns(b, p, weights):
    """Fetch columns of a panel of bfloat16 that are multiplied later."""
    fetch(b, weights, _TILES_AHEAD, tiles.COLUMNS * 2 * PANEL)


@emits()
def clear(b, p, rows, sums):
    """Set sums [rows, PANEL] to 0."""
    with cgutils.for_range(b, rows) as loop:
        for half in HALVES:
            store(b, vector_of(F32, 0.0, V), b.add(sums, b.mul(loop.index, int64(4 * PANEL))), 4 * V * half, 4)


# Counters that threads share, 64-bit integers at these byte offsets: tasks taken, threads that have begun, rows taken
# to be summed, rows summed.
COUNTERS = 4
_TASKS, _THREADS, _TAKEN, _SUMMED = 0, 8, 16, 24

# With up to `direct` rows panels are unpacked in registers, by tiles of `unpacking` rows; with more to scratch, if
# `unpacks`, by tiles of `tile` rows, each of which passes `block` panels before the next one; `scratch` has
# `scratch_bytes` for each thread, and a panel in it `unpacked_bytes`. `x_sums` has the sums of the segments of x, where
# they are needed, in `sum_bytes` for a row.
CALL_INTEGERS = f"{weight_vectors.CALL_INTEGERS} x_sums"
_OWN_INTEGERS = "sum_bytes direct unpacking unpacks tile block scratch_bytes unpacked_bytes copied_bytes"
INTEGERS = f"{CALL_INTEGERS} {LAYER_INTEGERS} {_OWN_INTEGERS}"
# Bytes of a thread's scratch in front of the unpacked panels: sums, parts of them, twice the columns of a tile, and the
# memory of tiles.
_SUMS, _COLUMNS = tiles.ROWS * PANEL * 4, tiles.COLUMNS * PANEL * 2
_TILES = 2 * _SUMS + 2 * _COLUMNS
_UNPACKED = _COPIED = _TILES + tiles.MEMORY_BYTES
# Columns beyond which tiles multiply many rows part by part: measured, 512 rows of 4,864 columns take three quarters of
# the time so, and fewer columns are faster at once. Columns of a part: a tile's rows of it are half of a core's
# first-level cache; rows and panels whose sums are kept meanwhile, half of the second; the bytes of these.
WIDE_COLUMNS = 1024
_STEP, _GROUP, GROUP_PANELS = 448, 512, 16
_GROUP_SUMS = _GROUP // tiles.ROWS * GROUP_PANELS * _SUMS


@cache
def compile_linear(format_name: str, kind: str, products: int, *, scales: bool, zeros: bool) -> Kernel:
    """Compile the kernel for a format, products, and y's dtype in KINDS. x is float32, or bfloat16 for its products.

    Threads called with the same zeroed counters share a call.
    """
    constants = {"of_format": FORMATS[format_name], "of_kind": KINDS[kind], "of_products": products}
    optional = {"of_scales": 1 + scales, "of_zeros": 1 + zeros}
    return compile_kernel(_multiply, constants | optional, INTEGERS, emitting=(weight_vectors, tiles, unpacking))


def plan(format_name: str, columns: int, segment: int, products: int) -> tuple[tuple[int, ...], int]:
    """Plan a layer of so many columns, of which those of a segment may have scales of their own.

    Returns the kernel's parameters from `direct` on, and the float32 of a thread's scratch.
    """
    unpacks = FORMATS[format_name] != (FLOAT32 if products == FLOATS else BFLOAT16)
    direct = _DIRECT_ROWS.get(products, {}).get(format_name, 0)
    panel_bytes = columns * PANEL * (4 if products == FLOATS else 2)
    block = max(1, _PASSED_BYTES // panel_bytes)
    most = tiles.ROWS
    rows, copied = (_UNPACKING_ROWS.get(products, most), unpacks, _ROWS.get(products, most)), 0
    if products in (TILES, EMULATED):
        # A segment with its own scales is not cut.
        step = max(segment, _STEP)
        copied = step * 2 * tiles.ROWS
        scratch = _COPIED + copied + _GROUP_SUMS + (GROUP_PANELS * step * PANEL * 2 if unpacks else 0)
    else:
        scratch = _UNPACKED + (block * panel_bytes if unpacks else 0)
    return (direct, *rows, block, scratch, panel_bytes, copied), scratch // 4


@kernel_part()
def _sum_tiles(p, at, rows, x, x_sums, weights, scales, zeros, unpacks, scratch):
    """Write the sums of rows and a panel to scratch, by tiles."""
    memory, parts, columns = scratch + _TILES, scratch + _SUMS, scratch + 2 * _SUMS
    clear(p, rows, scratch)
    segment = at.segment if at.scale_step else at.columns
    if unpacks:
        unpack(p, at, weights, zeros, columns, 0, tiles.COLUMNS)
    for first in range(0, at.columns, segment):
        begin_sums(p, memory)
        for column in range(first, min(first + segment, at.columns), tiles.COLUMNS):
            if unpacks:
                # In two places by turns: the next columns are written while these are multiplied.
                here = columns + column // tiles.COLUMNS % 2 * _COLUMNS
                later = column + tiles.COLUMNS
                if later < at.columns:
                    there = columns + later // tiles.COLUMNS % 2 * _COLUMNS
                    unpack(p, at, weights, zeros, there, later, later + tiles.COLUMNS)
            else:
                here = weights + column * PANEL * 2
                fetch_columns(p, here)
            add_products(p, memory, rows, x + 2 * column, at.x_bytes, here)
        write_sums(p, memory, rows, parts)
        number = first // segment
        step = number * at.scale_step
        add_scaled(p, rows, parts, x_sums + 4 * number, scales + step, zeros + step, scratch)


@kernel_part()
def _sum(p, at, rows, row, panel, weights, direct, scratch):
    """Write the sums of a tile of rows, of which the first is `row`, and a panel to scratch."""
    x, x_sums = at.x + row * at.x_bytes, at.x_sums + row * at.sum_bytes
    scales, zeros = at.scales + panel * at.scale_panel, at.zeros + panel * at.scale_panel
    if uses_tiles(p):
        _sum_tiles(p, at, rows, x, x_sums, weights, scales, zeros, direct, scratch)
    elif direct:
        multiply_codes(p, rows, x, weights, scales, zeros, scratch)
    else:
        multiply_unpacked(p, rows, x, weights, scales, zeros, scratch)


@kernel_part()
def _write(p, at, rows, row, panel, sums):
    """Write the outputs of a tile of rows, of which the first is `row`, and a panel."""
    begin = panel * PANEL
    width = min(PANEL, at.outputs - begin)
    for index in range(rows):
        y = at.y + (row + index) * at.y_bytes + begin * at.y_size
        write_row(p, sums + index * PANEL * 4, at.bias + begin * 4, y, width)


@kernel_part()
def _block(p, at, first, stop, scratch):
    """Multiply all rows by panels [first, stop)."""
    direct = at.rows <= at.direct
    unpacked = not direct and at.unpacks
    if unpacked:
        for panel in range(first, stop):
            to = scratch + _UNPACKED + (panel - first) * at.unpacked_bytes
            zeros = at.zeros + panel * at.scale_panel
            unpack(p, at, at.weights + panel * at.panel_bytes, zeros, to, 0, at.columns)
    row = 0
    while row < at.rows:
        count = tile_rows(at.rows - row, at.unpacking if direct else at.tile)
        if uses_tiles(p):
            configure(p, scratch + _TILES, count)
        for panel in range(first, stop):
            weights = at.weights + panel * at.panel_bytes
            if unpacked:
                weights = scratch + _UNPACKED + (panel - first) * at.unpacked_bytes
            _sum(p, at, count, row, panel, weights, direct, scratch)
            _write(p, at, count, row, panel, scratch)
        row += count


@kernel_part()
def _add_copied(p, memory, rows, x, weights, first, stop):
    """Add the products of columns [first, stop) of copied rows x and of a panel, both from their first column on."""
    for column in range(first, stop, tiles.COLUMNS):
        add_products(p, memory, rows, x + column * 2 * tiles.ROWS, 2 * tiles.COLUMNS, weights + column * PANEL * 2)


@kernel_part()
def _sum_columns(p, at, rows, x_sums, begin, end, panel, weights, sums, scratch):
    """Add the products of columns [begin, end) of copied rows and a panel to sums [ROWS, PANEL]; 0 before the first."""
    memory, parts, x = scratch + _TILES, scratch + _SUMS, scratch + _COPIED
    if at.scale_step == 0:
        if begin:
            read_sums(p, memory, rows, sums)
        else:
            begin_sums(p, memory)
        _add_copied(p, memory, rows, x, weights, 0, end - begin)
        write_sums(p, memory, rows, sums)
        return
    if begin == 0:
        clear(p, rows, sums)
    for first in range(begin, end, at.segment):
        begin_sums(p, memory)
        _add_copied(p, memory, rows, x, weights, first - begin, min(first + at.segment, end) - begin)
        write_sums(p, memory, rows, parts)
        number = first // at.segment
        step = panel * at.scale_panel + number * at.scale_step
        add_scaled(p, rows, parts, x_sums + 4 * number, at.scales + step, at.zeros + step, sums)


@kernel_part()
def _block_of_tiles(p, at, first, stop, scratch):
    """Multiply more rows than a tile has by panels [first, stop), one part of the columns after the other.

    The part of a tile's rows is copied, so that it stays in a core's first-level cache while all panels pass; these,
    and the sums of up to _GROUP rows, stay in the second.
    """
    step = at.segment * max(1, _STEP // at.segment) if at.scale_step else _STEP
    sums, columns = scratch + _COPIED + at.copied_bytes, scratch + _COPIED + at.copied_bytes + _GROUP_SUMS
    for group in range(0, at.rows, _GROUP):
        rows = min(_GROUP, at.rows - group)
        for begin in range(0, at.columns, step):
            end = min(begin + step, at.columns)
            size = (end - begin) * PANEL * 2
            if at.unpacks:
                for panel in range(first, stop):
                    zeros = at.zeros + panel * at.scale_panel
                    to = columns + (panel - first) * size
                    unpack(p, at, at.weights + panel * at.panel_bytes, zeros, to, begin, end)
            row = tile = 0
            while row < rows:
                count = tile_rows(rows - row, tiles.ROWS)
                configure(p, scratch + _TILES, count)
                x, x_sums = at.x + (group + row) * at.x_bytes, at.x_sums + (group + row) * at.sum_bytes
                for column in range(begin, end, tiles.COLUMNS):
                    to = scratch + _COPIED + (column - begin) * 2 * tiles.ROWS
                    copy_columns(p, count, x + 2 * column, at.x_bytes, to)
                for panel in range(first, stop):
                    weights = at.weights + panel * at.panel_bytes + begin * PANEL * 2
                    if at.unpacks:
                        weights = columns + (panel - first) * size
                    of_tile = sums + (tile * GROUP_PANELS + panel - first) * _SUMS
                    _sum_columns(p, at, count, x_sums, begin, end, panel, weights, of_tile, scratch)
                    if end == at.columns:
                        if at.scale_step == 0:
                            clear(p, count, scratch)
                            of_panel = panel * at.scale_panel
                            scales, zeros = at.scales + of_panel, at.zeros + of_panel
                            add_scaled(p, count, of_tile, x_sums, scales, zeros, scratch)
                            of_tile = scratch
                        _write(p, at, count, group + row, panel, of_tile)
                row += count
                tile += 1


def _multiply(p):
    at = carray(p, 1)[0]
    scratch = at.scratch + fetch_add(at.counters + _THREADS) * at.scratch_bytes
    while sums_rows(p):
        row = fetch_add(at.counters + _TAKEN)
        if row >= at.rows:
            wait_for(at.counters + _SUMMED, at.rows)
            break
        sum_row(p, at.x + row * at.x_bytes, at.x_sums + row * at.sum_bytes)
        fetch_add(at.counters + _SUMMED)
    while True:
        task = fetch_add(at.counters + _TASKS)
        if task >= at.tasks:
            if uses_tiles(p):
                release(p)
            return
        panel, stop = at.panels * task // at.tasks, at.panels * (task + 1) // at.tasks
        many = uses_tiles(p) and at.rows > tiles.ROWS and at.columns > WIDE_COLUMNS
        block = GROUP_PANELS if many else at.block
        while panel < stop:
            if many:
                _block_of_tiles(p, at, panel, min(stop, panel + block), scratch)
            else:
                _block(p, at, panel, min(stop, panel + block), scratch)
            panel += block
