"""The CPU's attention kernel over keys and values in their blocks, for decodes and prompts alike.

    for each task (some tokens of a sequence, some key heads), taken by the next free thread:
        for each PANEL of positions and each key head:   keys, transposed into a panel [dim, PANEL]
            for each tile of rows:                       scores[row, position] = scaling * query . key
        for each row:                                    weights = exp(scores - max), in place; factor = 1 / their sum
        for each block of positions and each key head:   values, packed in pairs of positions where tiles multiply
            for each tile of rows:                       sums[row] += weights * values, in the order of positions
        out[row] = factor * sums[row]

A row is a query head of a token: those that share a key head stand beside each other. A score's sum goes through the
dim in its order, a row's sum of values through the positions in theirs, and the softmax over the row's own positions: a
token's bits are the same alone, in a chunk of any size and beside any others.

query, out [tokens, heads, dim]; keys, values [slots, kv_heads, dim], of int8 with scales [slots, kv_heads]: scores and
weights are multiplied by them. The products are in attention_products.py. The formulas of softcap and sinks are those
of worker.engine.attention.paged.LayerCall. Head dims, the dtype and that of kept keys and values are constants of the
kernel's compilation, in the type of its parameters. Strides are in bytes.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from loraplex.kernels import attention_products, tiles, weight_vectors
from loraplex.kernels.attention_products import (
    VALUE_BLOCK,
    VALUE_ROWS,
    add_values,
    copy_query,
    gather_scales,
    key_words,
    pack_keys,
    pack_values,
    round_weights,
    row_tile,
    score_rows,
    score_tile,
    tile_bytes,
    write_factors,
)
from loraplex.kernels.compilation import Kernel, compile_kernel
from loraplex.kernels.llvm import (
    F32,
    I32,
    KINDS,
    LANES,
    broadcast,
    each_vector,
    emits,
    exponential,
    fetch_add,
    float32_pointer,
    fold_lanes,
    int64,
    int64_pointer,
    kernel_part,
    kind_bytes,
    load_floats,
    round_to_kind,
    store,
    sum_lanes,
    vector_of,
    vector_pieces,
)
from loraplex.kernels.tiles import (
    add_products,
    begin_sums,
    configure,
    load_panel,
    of_tiles,
    read_sums,
    release,
    uses_tiles,
    write_sums,
)
from loraplex.kernels.weight_vectors import PANEL, V, tile_rows

# Number of positions whose values are added, by vectors, for one head after the other.
_BLOCK = 64


@emits()
def store_attended(b, p, numbers, sums, stride, factor):
    """Convert a head's sum of values, multiplied by a factor, to the kernel's dtype.

    Where sums are of tiles, their panels are `stride` bytes from each other.
    """
    dim, kind = p.constant("of_value_dim"), p.constant("of_kind")
    size = kind_bytes(kind)

    def emit(wide: Any, first: int, lanes: int) -> None:
        store(b, round_to_kind(b, kind, b.fmul(wide, broadcast(b, factor, lanes)), lanes), numbers, size * first, size)

    if not of_tiles(p):
        for first, lanes in vector_pieces(dim):
            emit(load_floats(b, sums, first, lanes), first, lanes)
        return
    for first in range(0, dim, PANEL):
        panel = load_panel(b, b.add(sums, b.mul(stride, int64(first // PANEL))))
        for half, wide in enumerate(panel):
            emit(wide, first + V * half, V)


# 64-bit integers of a task: its first token in the flat batch, the number of tokens, the position of the first, the
# index in `tables` where its block table begins, its first key head, the number of key heads.
TASK_FIELDS = 6
_INTEGERS = (
    "query query_token query_head out out_token out_head keys values key_bytes value_bytes key_scales value_scales "
    "block_size sinks window tasks task_count tables counters scratch scratch_bytes kv_heads shared value_dim words "
    "score_rows tile_bytes"
)


@cache
def compile_attention(key_dim: int, value_dim: int, kind: str, stored: str, products: int) -> Kernel:
    """Compile the kernel. Threads called with the same two zeroed `counters` share the tasks.

    Queries and outputs are of dtype `kind`, keys and values of `stored`. 0 for the address of `sinks` (float32
    [heads]), for `window` and for `softcap` means none.
    """
    constants = {"of_key_dim": key_dim, "of_value_dim": value_dim, "of_kind": KINDS[kind], "of_kept": KINDS[stored]}
    constants["of_products"] = products
    return compile_kernel(
        _attend, constants, _INTEGERS, "scaling softcap", emitting=(weight_vectors, tiles, attention_products)
    )


def own_parameters(key_dim: int, value_dim: int, products: int) -> tuple[int, int, int, int]:
    """Return the kernel's parameters from `value_dim` on."""
    return value_dim, key_words(key_dim, products), row_tile(products), tile_bytes(value_dim, products)


def scratch_floats(rows: int, scores: int, positions: int, key_dim: int, value_dim: int, products: int) -> int:
    """Return the float32 of a thread's scratch for tasks of so many rows, scores and positions."""
    words = key_words(key_dim, products)
    before = 2 * (span_of(positions) + PANEL) + (words + 1) * PANEL + tile_bytes(value_dim, products) // 4
    # Each thread's begins with a cache line: lines of tiles would else be of two.
    return -(-(before + scores + rows * (words + value_dim + 1)) // 16) * 16


# Float32 behind a row of scores, a cache line: without it rows of some lengths would lie in few sets of the cache.
_BESIDE = 16


def span_of(positions: int) -> int:
    """Return the float32 from one row of scores to the next: whole panels of positions, and _BESIDE."""
    return -(-positions // PANEL) * PANEL + _BESIDE


# Score of a position that a row does not see: its exponential changes no sum.
_UNSEEN = np.float32(-3e38)
# Number of vectors of scores that are computed together.
_UNROLLED = 4


def _at(b: Any, scores: Any, index: Any, vector: int, lanes: int) -> Any:
    return b.add(b.add(scores, b.mul(index, int64(4))), int64(4 * vector * lanes))


def _totals(b: Any, initial: float, lanes: int) -> list[Any]:
    return [cgutils.alloca_once_value(b, vector_of(F32, initial, lanes)) for _ in range(_UNROLLED)]


@emits()
def cap_scores(b, scores, count, softcap):
    """Replace float32 scores by softcap * tanh(score / softcap); `count` is a multiple of LANES."""

    def emit(index, lanes, vectors):
        cap = broadcast(b, softcap, lanes)
        one, two = (vector_of(F32, number, lanes) for number in (1.0, 2.0))
        for vector in range(vectors):
            place = _at(b, scores, index, vector, lanes)
            # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            power = exponential(b, b.fdiv(b.fmul(two, load_floats(b, place, 0, lanes)), cap), lanes)
            tanh = b.fsub(one, b.fdiv(two, b.fadd(power, one)))
            store(b, b.fmul(cap, tanh), place, 0, 4)

    each_vector(b, count, emit, _UNROLLED)


@emits(types.float32)
def largest_score(b, scores, count, least):
    """Return the largest of `least` and `count` scores, a multiple of LANES. One that is no number is passed over."""
    largest = _totals(b, float(_UNSEEN), LANES)

    def larger(one, other):
        return b.select(b.fcmp_ordered(">", one, other), one, other)

    def emit(index, lanes, vectors):
        if lanes == LANES:
            for vector in range(vectors):
                score = load_floats(b, _at(b, scores, index, vector, lanes), 0, lanes)
                b.store(larger(score, b.load(largest[vector])), largest[vector])

    each_vector(b, count, emit, _UNROLLED)
    most = reduce(larger, map(b.load, largest))
    return larger(fold_lanes(b, most, LANES, larger), least)


@emits(types.float32)
def weigh_scores(b, scores, count, most):
    """Replace `count` scores, a multiple of LANES, by exp(score - most), and return their sum."""
    totals = _totals(b, 0.0, LANES)

    def emit(index, lanes, vectors):
        if lanes == LANES:
            for vector in range(vectors):
                place = _at(b, scores, index, vector, lanes)
                weight = exponential(b, b.fsub(load_floats(b, place, 0, lanes), broadcast(b, most, lanes)), lanes)
                store(b, weight, place, 0, 4)
                b.store(b.fadd(b.load(totals[vector]), weight), totals[vector])

    each_vector(b, count, emit, _UNROLLED)
    return sum_lanes(b, reduce(b.fadd, map(b.load, totals)), LANES)


@emits(types.float32)
def exponential_of(b, x):
    """Return exp(x)."""
    return b.extract_element(exponential(b, broadcast(b, x, 1), 1), ir.Constant(I32, 0))


@kernel_part()
def _first_seen(position, window):
    return max(0, position + 1 - window) if window > 0 else 0


@kernel_part()
def _weigh(scores, span, rows, shared, start, first, window, softcap, sinks, factors):
    """Replace the scores of rows by weights, without the factors, which go to `factors`.

    Positions that a row does not see have the weight 0. This function knows no shape, so that it is compiled once for
    all kernels of a process.
    """
    for row in range(rows):
        position, scores_of_row = start + row // shared, scores + row * span * 4
        low, stop = _first_seen(position, window) - first, position + 1 - first
        # Whole vectors around what the row sees; where they begin depends on its own position alone.
        begin, end = low // PANEL * PANEL, (stop + LANES - 1) // LANES * LANES
        seen, count = scores_of_row + begin * 4, end - begin
        if softcap > 0:
            cap_scores(seen, count, softcap)
        line = carray(float32_pointer(scores_of_row), (span,))
        line[begin:low] = _UNSEEN
        line[stop:end] = _UNSEEN
        sink = sinks[row % shared] if len(sinks) else _UNSEEN
        most = largest_score(seen, count, sink)
        total = weigh_scores(seen, count, most)
        if len(sinks):
            total += exponential_of(sink - most)
        factors[row] = np.float32(1.0) / total
        line[:low] = np.float32(0.0)
        line[stop:] = np.float32(0.0)


@kernel_part()
def _place(at, table, first, positions, places):
    """Write the slots, times the heads, of `positions` positions; pad with the last slot."""
    for index in range(len(places)):
        position = first + min(index, positions - 1)
        places[index] = (table[position // at.block_size] * at.block_size + position % at.block_size) * at.kv_heads


@kernel_part()
def _seen_by(start, first, shared, row):
    """Return the positions, from `first` on, that a row of a head and those before it see."""
    return start + row // shared + 1 - first


@kernel_part()
def _score(p, at, head, heads, rows, start, first, positions, span, places, queries, scores):
    """Write the scores of all rows of some heads, as far as the rows see."""
    words = at.words
    panel = places + 8 * (span + PANEL)
    factors = panel + words * PANEL * 4
    memory, configured = factors + PANEL * 4, 0
    for begin in range(0, positions, PANEL):
        for of in range(heads):
            key, scale = at.keys + (head + of) * at.key_bytes, at.key_scales + (head + of) * 4
            pack_keys(p, key, at.key_bytes, places + begin * 8, panel)
            write_factors(p, at.scaling, scale, places + begin * 8, factors)
            row = 0
            while row < rows:
                tile = tile_rows(rows - row, at.score_rows)
                query = queries + (of * rows + row) * words * 4
                to = scores + ((of * rows + row) * span + begin) * 4
                row += tile
                if _seen_by(start, first, at.shared, row - 1) <= begin:
                    continue
                if uses_tiles(p):
                    if tile != configured:
                        configure(p, memory, tile)
                        configured = tile
                    score_tile(p, tile, words, query, panel, factors, to, span * 4, memory)
                else:
                    score_rows(p, tile, query, panel, factors, to, span * 4)


@kernel_part()
def _sum_values(p, at, head, heads, rows, positions, span, places, weights, sums):
    """Write the weighted sums of values of all rows of some heads, by vectors."""
    zeros = carray(float32_pointer(sums), (heads * rows * at.value_dim,))
    zeros[:] = np.float32(0.0)
    # In memory the heads of a position stand beside each other.
    block = positions if heads == 1 else _BLOCK
    for begin in range(0, positions, block):
        count = min(block, positions - begin)
        for of in range(heads):
            value, scale = at.values + (head + of) * at.value_bytes, at.value_scales + (head + of) * 4
            row = of * rows
            while row < (of + 1) * rows:
                tile = tile_rows((of + 1) * rows - row, VALUE_ROWS)
                line, to = weights + (row * span + begin) * 4, sums + row * at.value_dim * 4
                add_values(p, tile, line, span * 4, value, at.value_bytes, scale, places + begin * 8, count, to)
                row += tile


@kernel_part()
def _sum_values_by_tiles(p, at, head, heads, rows, start, first, positions, span, places, weights, sums):
    """Write the same as `_sum_values`, as [heads, value_dim / PANEL, rows, PANEL]; weights become bfloat16."""
    memory = places + 8 * (span + PANEL) + (at.words + 1) * PANEL * 4
    packed = memory + tiles.MEMORY_BYTES
    scales, panels, configured = packed + VALUE_BLOCK * at.value_dim * 2, at.value_dim // PANEL, 0
    for begin in range(0, positions, VALUE_BLOCK):
        count = min(VALUE_BLOCK, (positions - begin + PANEL - 1) // PANEL * PANEL)
        of_places = places + begin * 8
        for of in range(heads):
            gather_scales(p, at.value_scales + (head + of) * 4, of_places, count, scales)
            pack_values(p, at.values + (head + of) * at.value_bytes, at.value_bytes, of_places, count, packed)
            row = 0
            while row < rows:
                tile = tile_rows(rows - row, tiles.ROWS)
                line = weights + ((of * rows + row) * span + begin) * 4
                to = sums + (of * panels * rows + row) * PANEL * 4
                row += tile
                seen = min(_seen_by(start, first, at.shared, row - 1) - begin, count)
                if seen <= 0:
                    continue
                if tile != configured:
                    configure(p, memory, tile)
                    configured = tile
                for one in range(tile):
                    round_weights(p, line + one * span * 4, scales, count)
                for panel in range(panels):
                    if begin:
                        read_sums(p, memory, tile, to)
                    else:
                        begin_sums(p, memory)
                    of_panel = packed + panel * VALUE_BLOCK * PANEL * 2
                    for position in range(0, seen, tiles.COLUMNS):
                        add_products(p, memory, tile, line + position * 2, span * 4, of_panel + position * PANEL * 2)
                    write_sums(p, memory, tile, to)
                    to += rows * PANEL * 4


@kernel_part()
def _run(p, at, task, places):
    token, count, start, table_at, head, heads = task
    shared, words = at.shared, at.words
    # Whole panels from the sequence's first position on: tiles add up the same positions in every task.
    first = _first_seen(start, at.window) // PANEL * PANEL
    positions, rows = start + count - first, count * shared
    span = (positions + PANEL - 1) // PANEL * PANEL + _BESIDE
    scores = places + 8 * (span + PANEL) + (words + 1) * PANEL * 4 + at.tile_bytes
    queries = scores + heads * rows * span * 4
    sums = queries + heads * rows * words * 4
    table = carray(int64_pointer(at.tables + table_at * 8), (start + count,))
    _place(at, table, first, positions, carray(int64_pointer(places), (span + PANEL,)))
    for of in range(heads):
        for row in range(rows):
            query = at.query + (token + row // shared) * at.query_token
            query += ((head + of) * shared + row % shared) * at.query_head
            copy_query(p, queries + (of * rows + row) * words * 4, query)
    _score(p, at, head, heads, rows, start, first, positions, span, places, queries, scores)
    factors = carray(float32_pointer(sums + heads * rows * at.value_dim * 4), (heads * rows,))
    for of in range(heads):
        sinks = carray(float32_pointer(at.sinks + (head + of) * shared * 4), (shared if at.sinks else 0,))
        lines, of_rows = scores + of * rows * span * 4, factors[of * rows : (of + 1) * rows]
        _weigh(lines, span, rows, shared, start, first, at.window, at.softcap, sinks, of_rows)
    if uses_tiles(p):
        _sum_values_by_tiles(p, at, head, heads, rows, start, first, positions, span, places, scores, sums)
    else:
        _sum_values(p, at, head, heads, rows, positions, span, places, scores, sums)
    for of in range(heads):
        for row in range(rows):
            out = at.out + (token + row // shared) * at.out_token
            out += ((head + of) * shared + row % shared) * at.out_head
            if uses_tiles(p):
                wide, stride = sums + (of * rows * at.value_dim + row * PANEL) * 4, rows * PANEL * 4
            else:
                wide, stride = sums + (of * rows + row) * at.value_dim * 4, 0
            store_attended(p, out, wide, stride, factors[of * rows + row])


def _attend(p):
    at = carray(p, 1)[0]
    scratch = at.scratch + fetch_add(at.counters + 8) * at.scratch_bytes
    tasks = carray(int64_pointer(at.tasks), (at.task_count, TASK_FIELDS))
    while True:
        index = fetch_add(at.counters)
        if index >= at.task_count:
            if uses_tiles(p):
                release(p)
            return
        line = tasks[index]
        _run(p, at, (line[0], line[1], line[2], line[3], line[4], line[5]), scratch)
