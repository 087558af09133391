"""The CPU's attention kernel over keys and values in their blocks, for decodes and prompts alike.

    for each task (some tokens of a sequence, some key heads), taken by the next free thread:
        for each PANEL of positions and each key head:   keys, transposed into a panel [dim, PANEL]
            for each tile of rows:                       scores[row, position] = scaling * query . key
        for each row:                                    weights = exp(scores - max), in place; factor = 1 / their sum
        for each block of positions and each key head:
            for each tile of rows:                       sums[row] += weights * values, position by position
        out[row] = factor * sums[row]

A row is a query head of a token: those that share a key head stand beside each other. A score's sum goes through the
dim in its order, a row's sum of values through the positions in theirs, and the softmax over the row's own positions: a
token's bits are the same alone, in a chunk of any size and beside any others.

query, out [tokens, heads, dim]; keys, values [slots, kv_heads, dim], of int8 with scales [slots, kv_heads]: scores and
weights are multiplied by them. All sums are float32; where the processor multiplies pairs of bfloat16, scores are of
these, by vectors or, where the dim is a multiple of 32, by tiles of AMX. The formulas of softcap and sinks are those of
worker.engine.attention.paged.LayerCall. Head dims, the dtype and that of kept keys and values are constants of the
kernel's compilation, in the type of its parameters. Strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils

from worker.engine.kernels import tiles, weight_vectors
from worker.engine.kernels.compilation import Kernel, compile_kernel
from worker.engine.kernels.llvm import (
    CONTRACT,
    EXP,
    F32,
    I32,
    I64,
    KINDS,
    LARGEST_EXPONENT,
    LN2,
    LOG2_E,
    Parameters,
    broadcast,
    cases,
    emits,
    fetch_add,
    float32_pointer,
    int64,
    int64_pointer,
    kernel_part,
    kind_bytes,
    load,
    load_as_float32,
    load_floats,
    round_to_kind,
    store,
    vector_of,
    vector_pieces,
    vector_type,
)
from worker.engine.kernels.tiles import (
    add_products,
    begin_sums,
    bfloat16_products,
    configure,
    release,
    uses_tiles,
    write_sums,
)
from worker.engine.kernels.weight_vectors import (
    EMULATED,
    FLOATS,
    FORMATS,
    HALVES,
    PAIRS,
    PANEL,
    TILES,
    TileSums,
    V,
    dot_pairs,
    fetch,
    load_half,
    pair_of,
    tile_rows,
)

# Maximum rows of a tile, whose sums and what they are made of fit the registers: of scores, and of values.
_SCORE_ROWS = {FLOATS: 6, PAIRS: 12}
_VALUE_ROWS = 6 if V == 16 else 3
# Vectors of sums of values, of up to 16 numbers each, that are in registers together.
_VALUE_VECTORS = 24 if V == 16 else 6
# Number of positions whose values are added for one head after the other.
_BLOCK = 64
# Number of positions by which values are fetched ahead; keys are fetched a panel ahead.
_AHEAD = 8
# Words of a key that one pass of the loop over them takes, where they are a multiple of it.
_WORDS_STEP = 4


def key_words(key_dim: int, products: int) -> int:
    """Return the 32-bit words of a query or key in the products' format."""
    return key_dim if products == FLOATS else key_dim // 2


def _products(p: Parameters) -> int:
    return p.constant("of_products")


def _of_pairs(p: Parameters) -> bool:
    """Tell whether queries and keys are multiplied as pairs of bfloat16, by vectors or tiles."""
    return _products(p) != FLOATS


def _transposed(b: Any, lines: Sequence[Any]) -> list[Any]:
    """Transpose V vectors of V words."""
    lines, step = list(lines), 1
    while step < V:
        # In each pair of lines, blocks of `step` words off the diagonal change places.
        low = [at if not at & step else V + at - step for at in range(V)]
        high = [at + step if not at & step else V + at for at in range(V)]
        masks = [ir.Constant(vector_type(I32, V), mask) for mask in (low, high)]
        for one in range(V):
            if not one & step:
                pair = lines[one], lines[one + step]
                lines[one], lines[one + step] = (b.shuffle_vector(*pair, mask) for mask in masks)
        step *= 2
    return lines


def _key_piece(b: Any, p: Parameters, key: Any, first: Any, words: int) -> Any:
    """Load words [first, first + words) of a key in the products' format, with zeros behind them: a vector."""
    kind = p.constant("of_kept")
    if words == V and _of_pairs(p):
        size = kind_bytes(kind)
        line = b.add(key, b.mul(first, int64(2 * size)))
        code = FORMATS["int8" if kind == KINDS["int8"] else "bfloat16"]
        return pair_of(b, code, load_half(b, code, line, 0), 0, None)
    if words == V:
        line = b.add(key, b.mul(first, int64(kind_bytes(kind))))
        return b.bitcast(load_as_float32(b, kind, line, 0, V), vector_type(I32, V))
    whole = vector_of(I32, 0, V)
    for begin, lanes in vector_pieces(words):
        part = _narrow_piece(b, p, key, b.add(first, int64(begin)), lanes)
        wide = b.shuffle_vector(part, part, ir.Constant(vector_type(I32, V), [at % lanes for at in range(V)]))
        mask = [V + at - begin if begin <= at < begin + lanes else at for at in range(V)]
        whole = b.shuffle_vector(whole, wide, ir.Constant(vector_type(I32, V), mask))
    return whole


def _narrow_piece(b: Any, p: Parameters, key: Any, first: Any, lanes: int) -> Any:
    kind = p.constant("of_kept")
    size, words = kind_bytes(kind), vector_type(I32, lanes)
    if not _of_pairs(p):
        return b.bitcast(load_as_float32(b, kind, b.add(key, b.mul(first, int64(size))), 0, lanes), words)
    line = b.add(key, b.mul(first, int64(2 * size)))
    if kind != KINDS["int8"]:
        return load(b, line, 0, words, 2)
    scaled = b.fmul(load_as_float32(b, kind, line, 0, 2 * lanes), vector_of(F32, 65536.0, 2 * lanes))
    bits = b.bitcast(scaled, vector_type(I32, 2 * lanes))
    low, high = (b.shuffle_vector(bits, bits, ir.Constant(words, list(range(at, 2 * lanes, 2)))) for at in (0, 1))
    return b.or_(high, b.lshr(low, vector_of(I32, 16, lanes)))


@emits()
def pack_keys(b, p, keys, key_bytes, places, panel):
    """Write the keys of PANEL positions as words [key_words, PANEL], and fetch those of the next PANEL.

    `places` are int64 indices of slots and heads; `keys` is the address of the first slot's key of the head.
    """
    words = key_words(p.constant("of_key_dim"), _products(p))
    size = p.constant("of_key_dim") * kind_bytes(p.constant("of_kept"))
    for at in range(PANEL):
        place = load(b, places, 8 * (PANEL + at), I64, 8)
        fetch(b, b.add(keys, b.mul(place, key_bytes)), 0, size)

    def write(first: Any, count: int) -> None:
        for half in HALVES:
            lines = []
            for at in range(V):
                place = load(b, places, 8 * (V * half + at), I64, 8)
                lines.append(_key_piece(b, p, b.add(keys, b.mul(place, key_bytes)), first, count))
            to = b.add(panel, b.mul(first, int64(4 * PANEL)))
            for word, vector in enumerate(_transposed(b, lines)[:count]):
                store(b, vector, to, 4 * (PANEL * word + V * half), 4)

    if words >= V:
        with cgutils.for_range_slice(b, int64(0), int64(words - words % V), int64(V), I64) as (first, _):
            write(first, V)
    if words % V:
        write(int64(words - words % V), words % V)


@emits()
def score_rows(b, p, count, queries, panel, factors, scores, stride):
    """Write scores[row, PANEL positions] of up to _SCORE_ROWS rows: factors[position] * query . key."""
    for rows in cases(b, count, range(1, _SCORE_ROWS.get(_products(p), 0) + 1)):
        _score_rows(b, p, rows, queries, panel, factors, scores, stride)


def _score_rows(
    b: Any, p: Parameters, rows: int, queries: Any, panel: Any, factors: Any, scores: Any, stride: Any
) -> None:
    words = key_words(p.constant("of_key_dim"), _products(p))
    pairs = _products(p) == PAIRS
    step = _WORDS_STEP if words % _WORDS_STEP == 0 else 1
    sums = TileSums(b, F32, rows)
    sums.clear()
    with cgutils.for_range_slice(b, int64(0), int64(words), int64(step), I64) as (first, _):
        line, of_rows = b.add(panel, b.mul(first, int64(4 * PANEL))), b.add(queries, b.mul(first, int64(4)))
        for word in range(step):
            keys = [
                load(b, line, 4 * (PANEL * word + V * half), vector_type(I32 if pairs else F32, V), 4)
                for half in HALVES
            ]
            for row in range(rows):
                one = broadcast(b, load(b, of_rows, 4 * (words * row + word), I32 if pairs else F32, 4), V)
                for half in HALVES:
                    if pairs:
                        sums[row, half] = dot_pairs(b, sums[row, half], one, keys[half])
                    else:
                        multiplied = b.fmul(one, keys[half], flags=CONTRACT)
                        sums[row, half] = b.fadd(sums[row, half], multiplied, flags=CONTRACT)
    for row, half in sums.places:
        score = b.fmul(sums[row, half], load_floats(b, factors, V * half, V))
        store(b, score, b.add(scores, b.mul(stride, int64(row))), 4 * V * half, 4)


@emits()
def scale_scores(b, p, rows, sums, factors, scores, stride):
    """Write scores[row, PANEL positions]: factors[position] * sums [rows, PANEL]."""
    with cgutils.for_range(b, rows) as loop:
        line, to = b.add(sums, b.mul(loop.index, int64(4 * PANEL))), b.add(scores, b.mul(loop.index, stride))
        for half in HALVES:
            score = b.fmul(load_floats(b, line, V * half, V), load_floats(b, factors, V * half, V))
            store(b, score, to, 4 * V * half, 4)


@kernel_part()
def _score_tile(p, rows, words, queries, panel, factors, scores, stride, memory):
    """Write the same as `score_rows` by tiles, which are configured for so many rows."""
    sums = memory + tiles.MEMORY_BYTES
    begin_sums(p, memory)
    for word in range(0, words, tiles.COLUMNS // 2):
        add_products(p, memory, rows, queries + 4 * word, 4 * words, panel + 4 * PANEL * word)
    write_sums(p, memory, rows, sums)
    scale_scores(p, rows, sums, factors, scores, stride)


@emits()
def write_factors(b, p, scaling, key_scales, places, factors):
    """Write float32 [PANEL], by which sums of products with PANEL keys are multiplied to be scores."""
    kept_int8 = p.constant("of_kept") == KINDS["int8"]
    if not kept_int8:
        for half in HALVES:
            store(b, broadcast(b, scaling, V), factors, 4 * V * half, 4)
        return
    # Codes that are multiplied as pairs are scaled by 65536: see pair_of.
    shrink = ir.Constant(F32, 1 / 65536 if _of_pairs(p) else 1.0)
    for at in range(PANEL):
        place = load(b, places, 8 * at, I64, 8)
        scale = load(b, b.add(key_scales, b.mul(place, int64(4))), 0, F32, 4)
        store(b, b.fmul(b.fmul(scale, shrink), scaling), factors, 4 * at, 4)


@emits()
def add_values(b, p, count, weights, stride, values, value_bytes, scales, places, positions, sums):
    """Add weights[row, i] * value[places[i]] over positions to sums[row, value_dim], of up to _VALUE_ROWS rows.

    Values of int8 are multiplied by their scales.
    """
    for rows in cases(b, count, range(1, _VALUE_ROWS + 1)):
        _add_values(b, p, rows, (weights, stride), (values, value_bytes, scales, places, positions), sums)


def _groups(pieces: Sequence[tuple[int, int]], rows: int) -> Iterator[Sequence[tuple[int, int]]]:
    together = max(1, _VALUE_VECTORS // rows)
    for first in range(0, len(pieces), together):
        yield pieces[first : first + together]


def _add_values(b: Any, p: Parameters, rows: int, of_weights: Any, of_values: Any, sums: Any) -> None:
    weights, stride = of_weights
    values, value_bytes, scales, places, positions = of_values
    dim, kind = p.constant("of_value_dim"), p.constant("of_kept")
    lines = [b.add(weights, b.mul(stride, int64(row))) for row in range(rows)]
    for group in _groups(list(vector_pieces(dim)), rows):
        totals = {}
        for row, (first, lanes) in product(range(rows), group):
            totals[row, first] = cgutils.alloca_once(b, vector_type(F32, lanes))
            b.store(load_floats(b, sums, dim * row + first, lanes), totals[row, first])
        with cgutils.for_range_slice(b, int64(0), positions, int64(1), I64) as (at, _):
            place = load(b, b.add(places, b.mul(at, int64(8))), 0, I64, 8)
            value, offset = b.add(values, b.mul(place, value_bytes)), b.mul(at, int64(4))
            if group[0][0] == 0:
                later = load(b, b.add(places, b.mul(at, int64(8))), 8 * _AHEAD, I64, 8)
                fetch(b, b.add(values, b.mul(later, value_bytes)), 0, dim * kind_bytes(kind))
            pieces = [load_as_float32(b, kind, value, first, lanes) for first, lanes in group]
            for row, line in enumerate(lines):
                weight = load(b, b.add(line, offset), 0, F32, 4)
                if kind == KINDS["int8"]:
                    weight = b.fmul(weight, load(b, b.add(scales, b.mul(place, int64(4))), 0, F32, 4))
                for (first, lanes), piece in zip(group, pieces, strict=True):
                    weighed = b.fmul(broadcast(b, weight, lanes), piece, flags=CONTRACT)
                    b.store(b.fadd(b.load(totals[row, first]), weighed, flags=CONTRACT), totals[row, first])
        for (row, first), memory in totals.items():
            store(b, b.load(memory), sums, 4 * (dim * row + first), 4)


@emits()
def copy_query(b, p, to, numbers):
    """Write a query in the products' format."""
    dim, kind = p.constant("of_key_dim"), p.constant("of_kind")

    if _of_pairs(p):
        pointer = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(b, b.inttoptr(to, pointer), b.inttoptr(numbers, pointer), int64(2 * dim), int64(1))
        return
    for first, lanes in vector_pieces(dim):
        store(b, load_as_float32(b, kind, numbers, first, lanes), to, 4 * first, 4)


@emits()
def store_attended(b, p, numbers, wide, factor):
    """Convert a head's sum of values, multiplied by a factor, to the kernel's dtype."""
    dim, kind = p.constant("of_value_dim"), p.constant("of_kind")
    size = kind_bytes(kind)

    for first, lanes in vector_pieces(dim):
        product = b.fmul(load_floats(b, wide, first, lanes), broadcast(b, factor, lanes))
        store(b, round_to_kind(b, kind, product, lanes), numbers, size * first, size)


@emits(types.float32)
def power_of_two(b, exponent):
    """Return 2 ** exponent as a float32, for exponents from -126 to 127."""
    biased = b.add(b.trunc(exponent, I32), ir.Constant(I32, 127))
    return b.bitcast(b.shl(biased, ir.Constant(I32, 23)), F32)


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
    return compile_kernel(_attend, constants, _INTEGERS, "scaling softcap", emitting=(weight_vectors, tiles))


def fastest_products(key_dim: int, kind: str) -> int:
    """Return the products of queries of a dtype that this processor does fastest."""
    if kind != "bfloat16":
        return FLOATS
    return bfloat16_products(key_dim) if key_dim % 2 == 0 else FLOATS


def own_parameters(key_dim: int, value_dim: int, products: int) -> tuple[int, int, int, int]:
    """Return the kernel's parameters from `value_dim` on."""
    return value_dim, key_words(key_dim, products), _SCORE_ROWS.get(products, tiles.ROWS), _tile_bytes(products)


def _tile_bytes(products: int) -> int:
    """Return the bytes of scratch for tiles and their sums."""
    return tiles.MEMORY_BYTES + tiles.ROWS * PANEL * 4 if products in (TILES, EMULATED) else 0


def scratch_floats(rows: int, scores: int, positions: int, key_dim: int, value_dim: int, products: int) -> int:
    """Return the float32 of a thread's scratch for tasks of so many rows, scores and positions."""
    words = key_words(key_dim, products)
    before = 2 * (span_of(positions) + PANEL) + (words + 1) * PANEL + _tile_bytes(products) // 4
    # Each thread's begins with a cache line: lines of tiles would else be of two.
    return -(-(before + scores + rows * (words + value_dim + 1)) // 16) * 16


def span_of(positions: int) -> int:
    """Return whole panels of positions, for which a row of scores has room."""
    return -(-positions // PANEL) * PANEL


@njit(fastmath=True, error_model="numpy", inline="always")
def _exp(x):
    """Return exp(x) in float32: 2 ** n times a polynomial; inlined, so that loops of it vectorize."""
    x = max(x, np.float32(-LARGEST_EXPONENT))
    n = np.floor(x * np.float32(LOG2_E) + np.float32(0.5))
    r = x - n * np.float32(LN2[0]) - n * np.float32(LN2[1])
    y = np.float32(EXP[0])
    y = y * r + np.float32(EXP[1])
    y = y * r + np.float32(EXP[2])
    y = y * r + np.float32(EXP[3])
    y = y * r + np.float32(EXP[4])
    y = y * r + np.float32(EXP[5])
    return (y * r * r + r + np.float32(1.0)) * power_of_two(np.int64(n))


@kernel_part(fastmath=True)
def _softmax(scores, softcap, sink, has_sink):
    """Replace scores by exp(score - max), in place, and return the factor that makes their sum 1."""
    if softcap > 0:
        for i in range(len(scores)):
            # tanh(x) = 1 - 2 / (exp(2 x) + 1); beyond 20 it is 1.
            x = min(max(scores[i] / softcap, np.float32(-20.0)), np.float32(20.0))
            scores[i] = softcap * (np.float32(1.0) - np.float32(2.0) / (_exp(np.float32(2.0) * x) + np.float32(1.0)))
    most = sink if has_sink else scores[0]
    for i in range(len(scores)):
        most = max(most, scores[i])
    total = _exp(sink - most) if has_sink else np.float32(0.0)
    for i in range(len(scores)):
        weight = _exp(scores[i] - most)
        scores[i] = weight
        total += weight
    return np.float32(1.0) / total


@kernel_part()
def _first_seen(position, window):
    return max(0, position + 1 - window) if window > 0 else 0


@kernel_part()
def _weigh(scores, span, rows, shared, start, first, positions, window, softcap, sinks, factors):
    """Replace the scores of rows by weights, without the factors, which go to `factors`.

    Positions that a row does not see have the weight 0. This function knows no shape, so that it is compiled once for
    all kernels of a process.
    """
    for row in range(rows):
        position = start + row // shared
        low, stop = _first_seen(position, window) - first, position + 1 - first
        line = carray(float32_pointer(scores + row * span * 4), (positions,))
        sink = sinks[row % shared] if len(sinks) else np.float32(0.0)
        factors[row] = _softmax(line[low:stop], softcap, sink, len(sinks) != 0)
        line[:low] = np.float32(0.0)
        line[stop:] = np.float32(0.0)


@kernel_part()
def _place(at, table, first, positions, places):
    """Write the slots, times the heads of one, of `positions` positions; of those behind them the last's again."""
    for index in range(len(places)):
        position = first + min(index, positions - 1)
        places[index] = (table[position // at.block_size] * at.block_size + position % at.block_size) * at.kv_heads


@kernel_part()
def _score(p, at, head, heads, rows, positions, span, places, queries, scores):
    """Write the scores of all rows of some heads."""
    words = at.words
    panel = places + 8 * (span + PANEL)
    factors = panel + words * PANEL * 4
    memory, configured = factors + PANEL * 4, 0
    for begin in range(0, positions, PANEL):
        for of in range(heads):
            key, scale = at.keys + (head + of) * at.key_bytes, at.key_scales + (head + of) * 4
            pack_keys(p, key, at.key_bytes, places + begin * 8, panel)
            write_factors(p, at.scaling, scale, places + begin * 8, factors)
            row = of * rows
            while row < (of + 1) * rows:
                tile = tile_rows((of + 1) * rows - row, at.score_rows)
                to = scores + (row * span + begin) * 4
                if uses_tiles(p):
                    if tile != configured:
                        configure(p, memory, tile)
                        configured = tile
                    _score_tile(p, tile, words, queries + row * words * 4, panel, factors, to, span * 4, memory)
                else:
                    score_rows(p, tile, queries + row * words * 4, panel, factors, to, span * 4)
                row += tile


@kernel_part()
def _sum_values(p, at, head, heads, rows, positions, span, places, weights, sums):
    """Write the weighted sums of values of all rows of some heads."""
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
                tile = tile_rows((of + 1) * rows - row, _VALUE_ROWS)
                line, to = weights + (row * span + begin) * 4, sums + row * at.value_dim * 4
                add_values(p, tile, line, span * 4, value, at.value_bytes, scale, places + begin * 8, count, to)
                row += tile


@kernel_part()
def _run(p, at, task, places):
    token, count, start, table_at, head, heads = task
    shared, words = at.shared, at.words
    first = _first_seen(start, at.window)
    positions, rows = start + count - first, count * shared
    span = (positions + PANEL - 1) // PANEL * PANEL
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
    _score(p, at, head, heads, rows, positions, span, places, queries, scores)
    factors = carray(float32_pointer(sums + heads * rows * at.value_dim * 4), (heads * rows,))
    for of in range(heads):
        sinks = carray(float32_pointer(at.sinks + (head + of) * shared * 4), (shared if at.sinks else 0,))
        lines, of_rows = scores + of * rows * span * 4, factors[of * rows : (of + 1) * rows]
        _weigh(lines, span, rows, shared, start, first, positions, at.window, at.softcap, sinks, of_rows)
    _sum_values(p, at, head, heads, rows, positions, span, places, scores, sums)
    for of in range(heads):
        for row in range(rows):
            out = at.out + (token + row // shared) * at.out_token
            out += ((head + of) * shared + row % shared) * at.out_head
            store_attended(p, out, sums + (of * rows + row) * at.value_dim * 4, factors[of * rows + row])


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
