"""The CPU's LoRA kernel: adds each row's own adapter to a group of layers, reading A and B in host memory in place.

torch's products of a few rows and ranks spend most of their time in calls, and gathering the adapters of a step first
would read and write all of their weights once more. This kernel reads each weight once for every ROWS rows of its
adapter, in one call for each group of layers with the same input:

    for each task (rows of one adapter, layer of the group, part of the ranks), taken by the next free thread:
        shrunk[row, layer, rank] = x[row] . A[rank]                         x [rows, in_features], A [rank, in_features]
    when all of these are done, for each task (rows of one adapter, layer of the group, part of the columns):
        y[row, columns] += sum over ranks of shrunk[row, layer, rank] * B[rank, columns]        B [rank, out_features]

With DoRA y is first rescaled: y + gain * y + shift. Sums are float32, and y is rounded once. A row's bits do not depend
on the other rows of the step. `shrunk` is float32; x, y, A, B, gain and shift have the kernel's dtype. Strides are in
bytes, lengths in elements.

In bfloat16, on processors with AMX and where all sizes are multiples of 32, both products are those of tiles.py, and
`shrunk` is rounded to bfloat16 [row, layer, ranks and zeros up to RANK_STEP]. Few rows and many take different ways to
the same bits:

    shrink   few: ranks of A are the rows of a tile, a row of x is a column      many: A becomes a panel
    expand   few: vectors, which add up in the order of tiles                     many: B becomes a panel
"""

from __future__ import annotations

from functools import cache

from numba import carray

from loraplex.kernels import lora_products, tiles, weight_vectors
from loraplex.kernels.compilation import Kernel, compile_kernel
from loraplex.kernels.llvm import KINDS, LANES, fetch_add, int64_pointer, kernel_part, wait_for
from loraplex.kernels.lora_products import (
    RANK_STEP,
    RANKS,
    ROWS,
    add_panel,
    clear_panel,
    clear_ranks,
    expand,
    pack_outputs,
    pack_ranks,
    round_ranks,
    shrink,
)
from loraplex.kernels.tiles import (
    add_columns,
    add_products,
    begin_sums,
    configure,
    configure_columns,
    read_sums,
    release,
    uses_tiles,
    write_column,
    write_sums,
)
from loraplex.kernels.weight_vectors import FLOATS, PANEL, tile_rows

# Maximum rows of a segment. The threads share the work of a long prompt, whatever stands beside it.
SEGMENT_ROWS = 128
# Minimum rows of a segment for which A and B become panels.
_MANY_ROWS = 8
# Maximum ranks of A that are the rows of a tile, and columns of A that are packed together: PANEL ranks of them are
# 32 KiB, which stay in a core's first-level cache.
_TILE_RANKS, _PACKED = 16, 512


def scratch_floats(max_rank: int, products: int) -> int:
    """Return the float32 of a thread's scratch: tiles, sums of a segment's rows, and a packed panel."""
    packed = max(_PACKED, -(-max_rank // RANK_STEP) * RANK_STEP) // 2 * PANEL
    return 0 if products == FLOATS else tiles.MEMORY_BYTES // 4 + SEGMENT_ROWS * PANEL + packed


@kernel_part()
def _sums_and_packed(memory):
    """Return the addresses of a thread's sums and its packed panel, which are behind its tiles."""
    sums = memory + tiles.MEMORY_BYTES
    return sums, sums + SEGMENT_ROWS * PANEL * 4


@kernel_part()
def _shrink_few(p, at, a, rank, low, high, x, rows, out, memory):
    """Write ranks [low, high) of a few rows."""
    sums, _ = _sums_and_packed(memory)
    line, configured = at.in_features * 2, 0
    for k in range(low, high, _TILE_RANKS):
        ranks, row = min(_TILE_RANKS, high - k), 0
        if ranks != configured:
            configure_columns(p, memory, ranks)
            configured = ranks
        while row < rows:
            together = ROWS if row + ROWS <= rows else 1
            begin_sums(p, memory)
            for column in range(0, at.in_features, tiles.COLUMNS):
                of_x = x + row * at.x_bytes + column * 2
                add_columns(p, memory, together, a + k * line + column * 2, line, of_x, at.x_bytes)
            for one in range(together):
                write_column(p, memory, one, sums)
                round_ranks(p, sums, ranks, out + (row + one) * at.shrunk_bytes + k * 2)
            row += together
    if high == rank:
        for one in range(rows):
            clear_ranks(p, out + one * at.shrunk_bytes, rank)


@kernel_part()
def _shrink_many(p, at, a, rank, x, rows, out, memory):
    """Write all ranks of many rows, up to SEGMENT_ROWS."""
    sums, packed = _sums_and_packed(memory)
    line, configured = at.in_features * 2, 0
    for k in range(0, rank, PANEL):
        ranks = min(PANEL, rank - k)
        for begin in range(0, at.in_features, _PACKED):
            count = min(_PACKED, at.in_features - begin)
            pack_ranks(p, a + k * line + begin * 2, line, ranks, count, packed)
            row = 0
            while row < rows:
                tile = tile_rows(rows - row, tiles.ROWS)
                if tile != configured:
                    configure(p, memory, tile)
                    configured = tile
                of_x, to = x + row * at.x_bytes + begin * 2, sums + row * PANEL * 4
                if begin:
                    read_sums(p, memory, tile, to)
                else:
                    begin_sums(p, memory)
                for column in range(0, count, tiles.COLUMNS):
                    add_products(p, memory, tile, of_x + column * 2, at.x_bytes, packed + column * PANEL * 2)
                write_sums(p, memory, tile, to)
                row += tile
        for row in range(rows):
            round_ranks(p, sums + row * PANEL * 4, ranks, out + row * at.shrunk_bytes + k * 2)
    for row in range(rows):
        clear_ranks(p, out + row * at.shrunk_bytes, rank)


@kernel_part()
def _shrink_by_tiles(p, at, pair, layer, segment, part, memory):
    a, _, rank, _, _ = pair
    _, first, stop = segment
    out, x = at.shrunk + layer * at.max_rank * 2, at.x
    if stop - first < _MANY_ROWS:
        low, high = rank * part // at.parts, rank * (part + 1) // at.parts
        of_rows = x + first * at.x_bytes
        _shrink_few(p, at, a, rank, low, high, of_rows, stop - first, out + first * at.shrunk_bytes, memory)
        return
    # Each part packs A, which pays for _MANY_ROWS; with many threads some have no part.
    rows = stop - first
    parts = min(at.parts, rows // _MANY_ROWS)
    if part < parts:
        low, high = first + rows * part // parts, first + rows * (part + 1) // parts
        _shrink_many(p, at, a, rank, x + low * at.x_bytes, high - low, out + low * at.shrunk_bytes, memory)


@kernel_part()
def _expand_by_tiles(p, at, pair, layer, columns, segment, part, memory):
    """Do the same as `_expand`; what a row gets has the same bits."""
    _, b, rank, gain, shift = pair
    begin, width = columns
    _, first, stop = segment
    rescaled, panels, configured = 1 if gain else 0, width // PANEL, 0
    sums, packed = _sums_and_packed(memory)
    clear_panel(p, packed, rank)
    for panel in range(panels * part // at.parts, panels * (part + 1) // at.parts):
        column = panel * PANEL * 2
        pack_outputs(p, b + column, width * 2, rank, packed)
        row = first
        while row < stop:
            tile = tile_rows(stop - row, tiles.ROWS)
            if tile != configured:
                configure(p, memory, tile)
                configured = tile
            begin_sums(p, memory)
            shrunk = at.shrunk + row * at.shrunk_bytes + layer * at.max_rank * 2
            for of_rank in range(0, rank, tiles.COLUMNS):
                add_products(p, memory, tile, shrunk + of_rank * 2, at.shrunk_bytes, packed + of_rank * PANEL * 2)
            write_sums(p, memory, tile, sums)
            y = at.y + row * at.y_bytes + begin * 2 + column
            for one in range(tile):
                add_panel(p, rescaled, sums + one * PANEL * 4, y + one * at.y_bytes, gain + column, shift + column)
            row += tile


# Number of columns of B that one pass covers where many rows share B: with usual ranks (8 to 64) they stay in L1 or L2.
_BLOCK = 512
# 64-bit integers of a pair in the table `slots` [slots, layers, PAIR_FIELDS]: the addresses of A [rank, in_features]
# and B [rank, out_features], the rank, and the addresses of gain and shift [out_features], 0 without DoRA.
PAIR_FIELDS = 5
# 64-bit integers of a layer in the table `layers`: its first column in y, and its number of columns.
_COLUMN_FIELDS = 2
# 64-bit integers of a segment, consecutive rows with one adapter: its slot, its first row, its last row + 1.
SEGMENT_FIELDS = 3
# Counters that threads share, 64-bit integers at these byte offsets: shrink tasks taken, shrink tasks done, expand
# tasks taken, and threads that have their scratch.
COUNTERS = 4
_SHRINKS, _SHRUNK, _EXPANDS, _THREADS = 0, 8, 16, 24

_INTEGERS = (
    "x x_bytes in_features y y_bytes slots layers layer_count segments segment_count parts counters shrunk "
    "shrunk_bytes max_rank number_bytes shrunk_size scratch scratch_bytes"
)


@cache
def compile_lora(kind: str, products: int) -> Kernel:
    """Compile the kernel for a dtype in KINDS. Threads called with the same zeroed `counters` share the tasks."""
    constants = {"of_kind": KINDS[kind], "of_products": products}
    return compile_kernel(_apply, constants, _INTEGERS, emitting=(weight_vectors, tiles, lora_products))


@kernel_part(fastmath=True)
def _shrink(p, at, pair, layer, segment, part):
    a, _, rank, _, _ = pair
    _, row, stop = segment
    count = at.in_features
    low, high = rank * part // at.parts, rank * (part + 1) // at.parts
    while row < stop and low < high:
        rows = ROWS if row + ROWS <= stop else 1
        x = at.x + row * at.x_bytes
        out = at.shrunk + row * at.shrunk_bytes + layer * at.max_rank * 4
        k = low
        while k < high:
            ranks = RANKS if k + RANKS <= high else 1
            shrink(p, rows, ranks, x, a + k * count * at.number_bytes, count, out + k * 4)
            k += ranks
        row += rows


@kernel_part(fastmath=True)
def _expand(p, at, pair, layer, columns, segment, part):
    _, b, rank, gain, shift = pair
    begin, width = columns
    _, first, stop = segment
    vectors, size = (width + LANES - 1) // LANES, at.number_bytes
    low, high = min(width, vectors * part // at.parts * LANES), min(width, vectors * (part + 1) // at.parts * LANES)
    rescaled = 1 if gain else 0
    block = _BLOCK if stop - first >= 2 * ROWS else width
    while low < high:
        count = min(block, high - low)
        weights, change = (b + low * size, width * size), (gain + low * size, shift + low * size)
        row = first
        while row < stop:
            rows = ROWS if row + ROWS <= stop else 1
            factors = at.shrunk + row * at.shrunk_bytes + layer * at.max_rank * at.shrunk_size
            y = at.y + row * at.y_bytes + (begin + low) * size
            expand(p, rows, rescaled, y, factors, rank, weights, change, count)
            row += rows
        low += count


@kernel_part(fastmath=True)
def _task(at, index):
    """Unpack a task: its part, its layer, the slot's pair in that layer, the layer's columns, and the segment."""
    part, index = index % at.parts, index // at.parts
    layer = index % at.layer_count
    line = carray(int64_pointer(at.segments), (at.segment_count, SEGMENT_FIELDS))[index // at.layer_count]
    of_layer = carray(int64_pointer(at.layers), (at.layer_count, _COLUMN_FIELDS))[layer]
    fields = carray(int64_pointer(at.slots + (line[0] * at.layer_count + layer) * PAIR_FIELDS * 8), (PAIR_FIELDS,))
    pair = (fields[0], fields[1], fields[2], fields[3], fields[4])
    return part, layer, pair, (of_layer[0], of_layer[1]), (line[0], line[1], line[2])


def _apply(p):
    at = carray(p, 1)[0]
    counters = at.counters
    memory = at.scratch + fetch_add(counters + _THREADS) * at.scratch_bytes
    tasks = at.segment_count * at.layer_count * at.parts
    while True:
        index = fetch_add(counters + _SHRINKS)
        if index >= tasks:
            break
        part, layer, pair, columns, segment = _task(at, index)
        if uses_tiles(p):
            _shrink_by_tiles(p, at, pair, layer, segment, part, memory)
        else:
            _shrink(p, at, pair, layer, segment, part)
        fetch_add(counters + _SHRUNK)
    wait_for(counters + _SHRUNK, tasks)
    while True:
        index = fetch_add(counters + _EXPANDS)
        if index >= tasks:
            break
        part, layer, pair, columns, segment = _task(at, index)
        if pair[2] and uses_tiles(p) and segment[2] - segment[1] >= _MANY_ROWS:
            _expand_by_tiles(p, at, pair, layer, columns, segment, part, memory)
        elif pair[2]:
            _expand(p, at, pair, layer, columns, segment, part)
    if uses_tiles(p):
        release(p)
