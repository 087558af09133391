"""Products of the CPU's LoRA kernel with A, shrink, and with B, expand: by vectors, or by panels for tiles.

In bfloat16, where the products are of tiles, `shrunk` is bfloat16 too, and vectors add up in the order of tiles: even
and odd ranks of each RANK_STEP apart, then both sums. So few rows by vectors and many by tiles get the same bits.
(Tiles take numbers below 2 ** -126 for 0; vectors don't.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from math import gcd
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from loraplex.kernels.llvm import (
    CONTRACT,
    F32,
    I16,
    I32,
    I64,
    KINDS,
    LANES,
    KernelArgs,
    broadcast,
    cases,
    each_vector,
    emits,
    int64,
    kind_bytes,
    load,
    load_as_float32,
    load_floats,
    round_to_kind,
    store,
    sum_lanes,
    vector_of,
    vector_type,
)
from loraplex.kernels.tiles import COLUMNS, bfloat16_products, even_of, load_panel, odd_of, of_tiles, store_pairs
from loraplex.kernels.weight_vectors import FLOATS, HALVES, PANEL, TILES, V, fetch, transposed

# Numbers of rows of one adapter that share each read of its weights, and of ranks that share each read of rows.
ROWS, RANKS = 4, 4
# Bytes ahead of their use at which weights are fetched: the processor alone does not see that a few numbers of each of
# many lines are read, and waits for the memory (measured on a Zen 5 with 4 rows an adapter, 1.6 times the time).
_SHRINK_AHEAD, _EXPAND_AHEAD = 2048, 768
# Number of vectors of outputs that are computed together, by the number of rows.
_VECTORS = {1: 24, ROWS: 4}
# Multiple of the ranks for which a row of `shrunk` has room: those that a product of tiles adds up.
RANK_STEP = COLUMNS


def fastest_products(kind: str, sizes: Iterable[int]) -> int:
    """Return the products of this processor for layers of such numbers of inputs and outputs: of tiles or float32."""
    products = bfloat16_products(gcd(*sizes)) if kind == "bfloat16" else FLOATS
    return products if products == TILES else FLOATS


def _lines(b: Any, address: Any, stride: Any, count: int) -> list[Any]:
    return [b.add(address, b.mul(stride, int64(index))) for index in range(count)]


def _bytes(b: Any, count: Any, size: int) -> Any:
    return b.mul(count, int64(size))


def _offset(b: Any, address: Any, index: Any, size: int) -> Any:
    return b.add(address, _bytes(b, index, size))


@emits()
def shrink(b, p, rows, ranks, x, weights, count, out):
    """Compute out[row, rank] = x[row] . weights[rank] for 1 or ROWS rows and 1 or RANKS contiguous ranks of A."""
    for of_rows in cases(b, rows, (1, ROWS)):
        for of_ranks in cases(b, ranks, (1, RANKS)):
            _shrink_rows(b, p, of_rows, of_ranks, x, weights, count, out)


def _shrink_rows(b: Any, p: KernelArgs, rows: int, ranks: int, x: Any, weights: Any, count: Any, out: Any) -> None:
    kind = p.constant("of_kind")
    size = kind_bytes(kind)

    of_x = _lines(b, x, p.load("x_bytes"), rows)
    of_weights = _lines(b, weights, _bytes(b, count, size), ranks)
    of_out = _lines(b, out, p.load("shrunk_bytes"), rows)

    def zeros(lanes):
        return cgutils.alloca_once_value(b, vector_of(F32, 0.0, lanes))

    # For each pair of row and rank a vector of sums, and a scalar sum of the elements that fill no vector.
    pairs = [(row, rank) for row in range(rows) for rank in range(ranks)]
    sums = {(pair, lanes): zeros(lanes) for pair in pairs for lanes in (LANES, 1)}

    def body(index, lanes, _):
        xs = [load_as_float32(b, kind, _offset(b, line, index, size), 0, lanes) for line in of_x]
        places = [_offset(b, line, index, size) for line in of_weights]
        ws = [load_as_float32(b, kind, place, 0, lanes) for place in places]
        if lanes > 1:
            for place in places:
                fetch(b, place, _SHRINK_AHEAD, size * lanes)
        for pair in pairs:
            place = sums[pair, lanes]
            product = b.fmul(xs[pair[0]], ws[pair[1]], flags=CONTRACT)
            b.store(b.fadd(b.load(place), product, flags=CONTRACT), place)

    each_vector(b, count, body)
    for row, rank in pairs:
        whole, rest = (b.load(sums[(row, rank), lanes]) for lanes in (LANES, 1))
        last = b.extract_element(rest, ir.Constant(I32, 0))
        total = b.fadd(sum_lanes(b, whole, LANES), last, flags=CONTRACT)
        store(b, total, of_out[row], 4 * rank, 4)


@emits()
def expand(b, p, rows, rescaled, y, factors, ranks, weights, change, count):
    """Compute y[row] += sum over ranks of factors[row, rank] * weights[rank] for 1 or ROWS rows, rounded once.

    `weights` are the address of B's first rank and the stride of ranks. Where `rescaled` is 1, and not 0,
    y + gain * y + shift takes the place of y; `change` are the addresses of gain and shift.
    """
    for of_rows in cases(b, rows, _VECTORS):
        for with_change in cases(b, rescaled, (0, 1)):
            _expand_rows(b, p, of_rows, bool(with_change), y, factors, ranks, (weights, change), count)


def _expand_rows(
    b: Any, p: KernelArgs, rows: int, rescaled: bool, y: Any, factors: Any, ranks: Any, pairs: Any, count: Any
) -> None:
    size = kind_bytes(p.constant("of_kind"))
    weights, weights_stride, gain, shift = (b.extract_value(two, at) for two in pairs for at in (0, 1))
    of_y = _lines(b, y, p.load("y_bytes"), rows)
    of_factors = _lines(b, factors, p.load("shrunk_bytes"), rows)

    def body(index, lanes, vectors):
        parts = [part * lanes for part in range(vectors)]
        first = _offset(b, weights, index, size)
        sum_ranks = _sum_ranks_as_tiles if of_tiles(p) else _sum_ranks
        totals = sum_ranks(b, p, lanes, parts, of_factors, ranks, first, weights_stride)
        gains, shifts = (_offset(b, address, index, size) for address in (gain, shift))
        for places, of_row in zip(totals, of_y, strict=True):
            here = _offset(b, of_row, index, size)
            for place, part in zip(places, parts, strict=True):
                change = (gains, shifts) if rescaled else None
                _add_to_output(b, p, b.load(place), here, part, lanes, change)

    each_vector(b, count, body, _VECTORS[rows])


def _sums(b: Any, lanes: int, rows: int, parts: int) -> list[list[Any]]:
    totals = [[cgutils.alloca_once(b, vector_type(F32, lanes)) for _ in range(parts)] for _ in range(rows)]
    _clear(b, totals, lanes)
    return totals


def _clear(b: Any, totals: list[list[Any]], lanes: int) -> None:
    for place in chain(*totals):
        b.store(vector_of(F32, 0.0, lanes), place)


def _sum_ranks(
    b: Any, p: KernelArgs, lanes: int, parts: list[int], of_factors: list[Any], ranks: Any, weights: Any, stride: Any
) -> list[list[Any]]:
    """Return the sums over ranks of factors and weights, by row and part."""
    totals = _sums(b, lanes, len(of_factors), len(parts))
    with cgutils.for_range_slice(b, int64(0), ranks, int64(1), I64) as (rank, _):
        line = b.add(weights, b.mul(rank, stride))
        ws = [load_as_float32(b, p.constant("of_kind"), line, part, lanes) for part in parts]
        if lanes > 1:
            fetch(b, line, _EXPAND_AHEAD, kind_bytes(p.constant("of_kind")) * lanes * len(parts))
        for places, of_row in zip(totals, of_factors, strict=True):
            factor = broadcast(b, load(b, _offset(b, of_row, rank, 4), 0, F32, 4), lanes)
            for place, piece in zip(places, ws, strict=True):
                b.store(b.fadd(b.load(place), b.fmul(factor, piece, flags=CONTRACT), flags=CONTRACT), place)
    return totals


def _sum_ranks_as_tiles(
    b: Any, p: KernelArgs, lanes: int, parts: list[int], of_factors: list[Any], ranks: Any, weights: Any, stride: Any
) -> list[list[Any]]:
    """Return the same of factors in bfloat16, as a product of tiles adds up: even and odd ranks apart, then both sums.

    Behind an odd number of ranks there is a factor 0.
    """
    totals, *by_parity = (_sums(b, lanes, len(of_factors), len(parts)) for _ in range(3))
    last = b.sub(ranks, int64(1))
    with cgutils.for_range_slice(b, int64(0), ranks, int64(RANK_STEP), I64) as (first, _):
        for sums in by_parity:
            _clear(b, sums, lanes)
        end = b.add(first, int64(RANK_STEP))
        end = b.select(b.icmp_signed("<", end, ranks), end, ranks)
        with cgutils.for_range_slice(b, first, end, int64(2), I64) as (rank, _):
            words = [load(b, _offset(b, of_row, rank, 2), 0, I32, 4) for of_row in of_factors]
            for parity, (sums, of) in enumerate(zip(by_parity, (even_of, odd_of), strict=True)):
                one = b.add(rank, int64(parity))
                line = b.add(weights, b.mul(b.select(b.icmp_signed("<", one, last), one, last), stride))
                ws = [load_as_float32(b, p.constant("of_kind"), line, part, lanes) for part in parts]
                for places, word in zip(sums, words, strict=True):
                    factor = of(b, broadcast(b, word, lanes), lanes)
                    for place, piece in zip(places, ws, strict=True):
                        b.store(b.fadd(b.load(place), b.fmul(factor, piece, flags=CONTRACT), flags=CONTRACT), place)
        for total, even, odd in zip(*map(chain.from_iterable, (totals, *by_parity)), strict=True):
            b.store(b.fadd(b.load(total), b.fadd(b.load(even), b.load(odd))), total)
    return totals


def _add_to_output(b: Any, p: KernelArgs, total: Any, y: Any, first: int, lanes: int, change: Any) -> None:
    """Write y + total, rounded once; with `change`, addresses of gain and shift, y + gain * y + shift + total."""
    kind = p.constant("of_kind")
    own = load_as_float32(b, kind, y, first, lanes)
    if change is not None:
        gain, shift = (load_as_float32(b, kind, address, first, lanes) for address in change)
        shifted = b.fadd(b.fmul(own, gain, flags=CONTRACT), shift, flags=CONTRACT)
        total = b.fadd(total, shifted, flags=CONTRACT)
    value = round_to_kind(b, kind, b.fadd(own, total, flags=CONTRACT), lanes)
    size = kind_bytes(kind)
    store(b, value, y, size * first, size)


@emits()
def round_ranks(b, p, sums, count, out):
    """Write `count` float32 as bfloat16."""
    kind = KINDS["bfloat16"]

    def emit(index, lanes, vectors):
        wide = load_floats(b, _offset(b, sums, index, 4), 0, lanes)
        store(b, round_to_kind(b, kind, wide, lanes), _offset(b, out, index, 2), 0, 2)

    each_vector(b, count, emit)


@emits()
def clear_ranks(b, p, shrunk, ranks):
    """Write zeros behind a row's ranks in bfloat16, up to a multiple of RANK_STEP."""
    whole = b.and_(b.add(ranks, int64(RANK_STEP - 1)), int64(-RANK_STEP))
    with cgutils.for_range_slice(b, ranks, whole, int64(1), I64) as (rank, _):
        store(b, ir.Constant(I16, 0), _offset(b, shrunk, rank, 2), 0, 2)


@emits()
def pack_ranks(b, p, weights, line_bytes, ranks, columns, panel):
    """Write so many columns of up to PANEL ranks of A as words [columns / 2, PANEL]; beyond `ranks` numbers are any."""
    lines = []
    for rank in range(PANEL):
        index = b.select(b.icmp_signed("<", int64(rank), ranks), int64(rank), b.sub(ranks, int64(1)))
        lines.append(b.add(weights, b.mul(index, line_bytes)))

    def words(column: Any, half: int) -> list[Any]:
        of_half = (b.add(line, b.mul(column, int64(2))) for line in lines[V * half : V * half + V])
        return transposed(b, [load(b, line, 0, vector_type(I32, V), 2) for line in of_half])

    def write(column: Any, half: int, vectors: Sequence[Any]) -> None:
        for word, vector in enumerate(vectors):
            store(b, vector, b.add(panel, b.mul(column, int64(2 * PANEL))), 4 * (PANEL * word + V * half), 4)

    with cgutils.for_range_slice(b, int64(0), columns, int64(2 * V), I64) as (column, _):
        write(column, 0, words(column, 0))
        with b.if_else(b.icmp_signed(">", ranks, int64(V))) as (more, none):
            with more:
                write(column, 1, words(column, 1))
            with none:
                write(column, 1, [vector_of(I32, 0, V)] * V)


@emits()
def pack_outputs(b, p, weights, line_bytes, ranks, panel):
    """Write PANEL outputs of B as words [ranks / 2, PANEL] of two ranks: behind an odd number the last one again."""
    last = b.sub(ranks, int64(1))
    with cgutils.for_range_slice(b, int64(0), ranks, int64(2), I64) as (rank, _):
        second = b.add(rank, int64(1))
        places = rank, b.select(b.icmp_signed("<", second, last), second, last)
        one, other = (load(b, b.add(weights, b.mul(at, line_bytes)), 0, vector_type(I16, PANEL), 2) for at in places)
        store_pairs(b, one, other, b.add(panel, b.mul(rank, int64(2 * PANEL))), 0)


@emits()
def clear_panel(b, p, panel, ranks):
    """Write zeros behind the words of so many ranks, up to a multiple of RANK_STEP."""
    pairs = b.lshr(b.add(ranks, int64(1)), int64(1))
    whole = b.and_(b.add(pairs, int64(RANK_STEP // 2 - 1)), int64(-RANK_STEP // 2))
    with cgutils.for_range_slice(b, pairs, whole, int64(1), I64) as (pair, _):
        for half in HALVES:
            store(b, vector_of(I32, 0, V), b.add(panel, b.mul(pair, int64(4 * PANEL))), 4 * V * half, 4)


@emits()
def add_panel(b, p, rescaled, sums, y, gain, shift):
    """Compute y += sums of a panel, rounded once; where `rescaled`, y + gain * y + shift takes the place of y."""
    panel = load_panel(b, sums)
    for with_change in cases(b, rescaled, (0, 1)):
        for half, total in enumerate(panel):
            _add_to_output(b, p, total, y, V * half, V, (gain, shift) if with_change else None)
