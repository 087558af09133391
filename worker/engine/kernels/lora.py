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
"""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import Any

from llvmlite import ir
from numba import carray
from numba.core import cgutils

from worker.engine.kernels.compilation import Kernel, compile_kernel
from worker.engine.kernels.llvm import (
    CONTRACT,
    F32,
    I32,
    I64,
    KINDS,
    LANES,
    Parameters,
    broadcast,
    cases,
    each_vector,
    emits,
    fetch_add,
    int64,
    int64_pointer,
    kernel_part,
    kind_bytes,
    load,
    load_as_float32,
    round_to_kind,
    store,
    sum_lanes,
    vector_of,
    wait_for,
)

# Numbers of rows of one adapter that share each read of its weights, and of ranks that share each read of rows.
ROWS, RANKS = 4, 4
# Number of vectors of outputs that are computed together, by the number of rows.
_VECTORS = {1: 24, ROWS: 4}


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


def _shrink_rows(b: Any, p: Parameters, rows: int, ranks: int, x: Any, weights: Any, count: Any, out: Any) -> None:
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
        ws = [load_as_float32(b, kind, _offset(b, line, index, size), 0, lanes) for line in of_weights]
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
    b: Any, p: Parameters, rows: int, rescaled: bool, y: Any, factors: Any, ranks: Any, pairs: Any, count: Any
) -> None:
    kind = p.constant("of_kind")
    size = kind_bytes(kind)

    weights, weights_stride, gain, shift = (b.extract_value(two, at) for two in pairs for at in (0, 1))
    of_y = _lines(b, y, p.load("y_bytes"), rows)
    of_factors = _lines(b, factors, p.load("shrunk_bytes"), rows)

    def body(index, lanes, vectors):
        parts = [part * lanes for part in range(vectors)]
        zeros = vector_of(F32, 0.0, lanes)
        totals = [[cgutils.alloca_once_value(b, zeros) for _ in parts] for _ in of_y]
        for place in chain(*totals):
            b.store(zeros, place)
        first = _offset(b, weights, index, size)
        with cgutils.for_range_slice(b, int64(0), ranks, int64(1), I64) as (rank, _):
            line = b.add(first, b.mul(rank, weights_stride))
            ws = [load_as_float32(b, kind, line, part, lanes) for part in parts]
            for places, of_row in zip(totals, of_factors, strict=True):
                factor = broadcast(b, load(b, _offset(b, of_row, rank, 4), 0, F32, 4), lanes)
                for place, piece in zip(places, ws, strict=True):
                    b.store(b.fadd(b.load(place), b.fmul(factor, piece, flags=CONTRACT), flags=CONTRACT), place)
        gains, shifts = (_offset(b, address, index, size) for address in (gain, shift))
        for places, of_row in zip(totals, of_y, strict=True):
            here = _offset(b, of_row, index, size)
            for place, part in zip(places, parts, strict=True):
                own, total = load_as_float32(b, kind, here, part, lanes), b.load(place)
                if rescaled:
                    gained = b.fmul(own, load_as_float32(b, kind, gains, part, lanes), flags=CONTRACT)
                    shifted = b.fadd(gained, load_as_float32(b, kind, shifts, part, lanes), flags=CONTRACT)
                    total = b.fadd(total, shifted, flags=CONTRACT)
                value = round_to_kind(b, kind, b.fadd(own, total, flags=CONTRACT), lanes)
                store(b, value, here, part * size, size)

    each_vector(b, count, body, _VECTORS[rows])


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
# tasks taken.
COUNTERS = 3
_SHRINKS, _SHRUNK, _EXPANDS = 0, 8, 16

_INTEGERS = (
    "x x_bytes in_features y y_bytes slots layers layer_count segments segment_count parts counters shrunk "
    "shrunk_bytes max_rank number_bytes"
)


@cache
def compile_lora(kind: str) -> Kernel:
    """Compile the kernel for a dtype in KINDS. Threads called with the same zeroed `counters` share the tasks."""
    return compile_kernel(_apply, {"of_kind": KINDS[kind]}, _INTEGERS)


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
            weights, of_rank = a + k * count * at.number_bytes, out + k * 4
            shrink(p, rows, ranks, x, weights, count, of_rank)
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
            factors = at.shrunk + row * at.shrunk_bytes + layer * at.max_rank * 4
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
    tasks = at.segment_count * at.layer_count * at.parts
    while True:
        index = fetch_add(counters + _SHRINKS)
        if index >= tasks:
            break
        part, layer, pair, columns, segment = _task(at, index)
        _shrink(p, at, pair, layer, segment, part)
        fetch_add(counters + _SHRUNK)
    wait_for(counters + _SHRUNK, tasks)
    while True:
        index = fetch_add(counters + _EXPANDS)
        if index >= tasks:
            return
        part, layer, pair, columns, segment = _task(at, index)
        if pair[2]:
            _expand(p, at, pair, layer, columns, segment, part)
