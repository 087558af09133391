"""Products of the CPU's attention kernel: scores of queries and keys, and sums of weighted values.

    scores    keys of PANEL positions, transposed into a panel [dim, PANEL]; multiplied by each row's query
    values    by vectors: weights [row, position] * value, position by position, sums [row, dim]
              by tiles: weights are rounded to bfloat16, values of VALUE_BLOCK positions become panels of PANEL numbers,
              [positions / 2, PANEL] words of two positions; sums [dim / PANEL, row, PANEL]

Where the processor multiplies pairs of bfloat16, scores are of these: by vectors or, where the dims are multiples of
32, by tiles of AMX, which multiply weights and values too. Tiles add up positions 32 by 32 from the sequence's first,
in every task, so that a row's bits are the same alone and among others. All sums are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import gcd
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from loraplex.kernels import tiles
from loraplex.kernels.llvm import (
    CONTRACT,
    F32,
    I16,
    I32,
    I64,
    KINDS,
    KernelArgs,
    broadcast,
    cases,
    emits,
    int64,
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
from loraplex.kernels.tiles import add_products, begin_sums, bfloat16_products, store_pairs, write_sums
from loraplex.kernels.weight_vectors import (
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
    transposed,
)

# Maximum rows of a tile, whose sums and what they are made of fit the registers: of scores, and of values.
_SCORE_ROWS = {FLOATS: 6, PAIRS: 12}
VALUE_ROWS = 6 if V == 16 else 3
# Vectors of sums of values, of up to 16 numbers each, that are in registers together.
_VALUE_VECTORS = 24 if V == 16 else 6
# Number of positions whose values are packed for tiles together: with 64 numbers each they are 16 KiB, which stay in a
# core's first-level cache.
VALUE_BLOCK = 128
# Number of positions by which values are fetched ahead; keys are fetched a panel ahead.
_AHEAD = 8
# Words of a key that one pass of the loop over them takes, where they are a multiple of it.
_WORDS_STEP = 4


def key_words(key_dim: int, products: int) -> int:
    """Return the 32-bit words of a query or key in the products' format."""
    return key_dim if products == FLOATS else key_dim // 2


def _products(p: KernelArgs) -> int:
    return p.constant("of_products")


def _of_pairs(p: KernelArgs) -> bool:
    """Tell whether queries and keys are multiplied as pairs of bfloat16, by vectors or tiles."""
    return _products(p) != FLOATS


def _key_piece(b: Any, p: KernelArgs, key: Any, first: Any, words: int) -> Any:
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


def _narrow_piece(b: Any, p: KernelArgs, key: Any, first: Any, lanes: int) -> Any:
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
            for word, vector in enumerate(transposed(b, lines)[:count]):
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
    b: Any, p: KernelArgs, rows: int, queries: Any, panel: Any, factors: Any, scores: Any, stride: Any
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
def score_tile(p, rows, words, queries, panel, factors, scores, stride, memory):
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
    """Add weights[row, i] * value[places[i]] over positions to sums[row, value_dim], of up to VALUE_ROWS rows.

    Values of int8 are multiplied by their scales.
    """
    for rows in cases(b, count, range(1, VALUE_ROWS + 1)):
        _add_values(b, p, rows, (weights, stride), (values, value_bytes, scales, places, positions), sums)


def _groups(pieces: Sequence[tuple[int, int]], rows: int) -> Iterator[Sequence[tuple[int, int]]]:
    together = max(1, _VALUE_VECTORS // rows)
    for first in range(0, len(pieces), together):
        yield pieces[first : first + together]


def _add_values(b: Any, p: KernelArgs, rows: int, of_weights: Any, of_values: Any, sums: Any) -> None:
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
def pack_values(b, p, values, value_bytes, places, count, panels):
    """Write the values of `count` positions, whole panels, as words [value_dim / PANEL, VALUE_BLOCK / 2, PANEL].

    A word has a number of two positions. `values` is the address of the first slot's value of the head.
    """
    kind, dim = p.constant("of_kept"), p.constant("of_value_dim")
    size = kind_bytes(kind)

    def line(at: Any, offset: int) -> Any:
        return b.add(values, b.mul(load(b, at, 8 * offset, I64, 8), value_bytes))

    with cgutils.for_range_slice(b, int64(0), count, int64(2), I64) as (at, _):
        of_places, to = b.add(places, b.mul(at, int64(8))), b.add(panels, b.mul(at, int64(2 * PANEL)))
        for position in range(2):
            fetch(b, line(of_places, _AHEAD + position), 0, dim * size)
        lines = [line(of_places, position) for position in range(2)]
        for first in range(0, dim, PANEL):
            one, other = (_value_halves(b, kind, here, first) for here in lines)
            store_pairs(b, one, other, to, first * VALUE_BLOCK * 2)


def _value_halves(b: Any, kind: int, value: Any, first: int) -> Any:
    """Load PANEL numbers of a value as bfloat16, of codes exactly."""
    if kind != KINDS["int8"]:
        return load(b, value, 2 * first, vector_type(I16, PANEL), 2)
    bits = b.bitcast(load_as_float32(b, kind, value, first, PANEL), vector_type(I32, PANEL))
    return b.trunc(b.lshr(bits, vector_of(I32, 16, PANEL)), vector_type(I16, PANEL))


@emits()
def gather_scales(b, p, scales, places, count, out):
    """Write float32 [count], by which weights of values of int8 are multiplied; nothing for other kinds."""
    if p.constant("of_kept") != KINDS["int8"]:
        return
    with cgutils.for_range(b, count) as loop:
        place = load(b, b.add(places, b.mul(loop.index, int64(8))), 0, I64, 8)
        scale = load(b, b.add(scales, b.mul(place, int64(4))), 0, F32, 4)
        store(b, scale, b.add(out, b.mul(loop.index, int64(4))), 0, 4)


@emits()
def round_weights(b, p, weights, scales, count):
    """Replace float32 weights of `count` positions, whole panels, by bfloat16, in the first half of their place.

    Those of values of int8 are multiplied by `scales` before.
    """
    with cgutils.for_range_slice(b, int64(0), count, int64(PANEL), I64) as (at, _):
        offset = b.mul(at, int64(4))
        parts = [load_floats(b, b.add(weights, offset), V * half, V) for half in HALVES]
        if p.constant("of_kept") == KINDS["int8"]:
            of_scales = b.add(scales, offset)
            parts = [
                b.fmul(part, load_floats(b, of_scales, V * half, V)) for half, part in zip(HALVES, parts, strict=True)
            ]
        to = b.add(weights, b.mul(at, int64(2)))
        for half, part in enumerate(parts):
            store(b, round_to_kind(b, KINDS["bfloat16"], part, V), to, 2 * V * half, 2)


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


def fastest_products(key_dim: int, value_dim: int, kind: str) -> int:
    """Return the products of queries of a dtype that this processor does fastest."""
    if kind != "bfloat16" or key_dim % 2:
        return FLOATS
    return bfloat16_products(gcd(key_dim, value_dim))


def row_tile(products: int) -> int:
    """Return the maximum rows of a tile of scores."""
    return _SCORE_ROWS.get(products, tiles.ROWS)


def tile_bytes(value_dim: int, products: int) -> int:
    """Return the bytes of scratch for tiles and, behind them, sums of scores, or packed values and scales."""
    behind = max(tiles.ROWS * PANEL * 4, VALUE_BLOCK * (2 * value_dim + 4))
    return tiles.MEMORY_BYTES + behind if products in (TILES, EMULATED) else 0
