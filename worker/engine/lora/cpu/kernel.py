"""LoRA for the rows of a step on the CPU: each with its own adapter, straight from where the adapters lie.

torch's products of a few rows and ranks spend most of their time on being called, and gathering the adapters of a step
would read and write all of what is read again afterwards. Here every number of an adapter is read once for every four
of its rows, by one call for each group of layers with the same input:

    for each task (rows of one adapter, layer of the group, part of the ranks), by whichever thread is free:
        shrunk[row, layer, rank] = x[row] . A[rank]
    when all of them are done, for each task (rows of one adapter, layer of the group, part of the columns):
        y[row, columns] += sum over ranks of shrunk[row, layer, rank] * B[rank, columns]

All is computed in float32 and rounded once. What a row gets does not depend on the rows of other adapters.
"""

# numba compiles these functions from their bytecode: it needs no annotations, and has no types for mypy to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from functools import cache
from typing import Any

from numba import carray, njit

from worker.engine.device.cpu import compilation
from worker.engine.device.cpu.llvm import KINDS, LANES, fetch_add, int64_pointer, load_counter, yield_thread
from worker.engine.lora.cpu import intrinsics
from worker.engine.lora.cpu.intrinsics import (
    ROWS,
    expand_1,
    expand_4,
    expand_dora_1,
    expand_dora_4,
    shrink_1x1,
    shrink_1x4,
    shrink_4x1,
    shrink_4x4,
)

# So many columns of B, of ranks that people use, stay in the nearest cache while many rows need them.
_BLOCK = 512
# Integers of a slot's share of a layer: where A [rank, in_features] and B [rank, out_features] are, the rank, and where
# gain and shift [out_features] are, 0 for none (see dora.py). `slots` are [slots, layers] of these.
PAIR_FIELDS = 5
# Of a layer: its first column in y, and how many.
_COLUMN_FIELDS = 2
# Of rows in a row with the same adapter: its slot, the first one, and the one behind the last.
SEGMENT_FIELDS = 3
COUNTERS = 3
_SHRINKS, _SHRUNK, _EXPANDS = 0, 8, 16
# Some tens of microseconds.
_SPINS = 20_000

_INTEGERS = (
    "x x_bytes in_features y y_bytes slots layers layer_count segments segment_count parts counters shrunk "
    "shrunk_bytes max_rank number_bytes"
)


@cache
def compile_lora(kind: str) -> Any:
    """The kernel for numbers of a kind. `counters` are zeros: threads called with the same ones share the tasks."""
    return compilation.compile_kernel(
        _apply, compilation.parameter_dtype(_INTEGERS.split(), [], {"of_kind": KINDS[kind]}), intrinsics
    )


@njit(fastmath=True, error_model="numpy")
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
            ranks = 4 if k + 4 <= high else 1
            weights, of_rank = a + k * count * at.number_bytes, out + k * 4
            if rows == 1 and ranks == 1:
                shrink_1x1(p, x, weights, count, of_rank)
            elif rows == 1:
                shrink_1x4(p, x, weights, count, of_rank)
            elif ranks == 1:
                shrink_4x1(p, x, weights, count, of_rank)
            else:
                shrink_4x4(p, x, weights, count, of_rank)
            k += ranks
        row += rows


@njit(fastmath=True, error_model="numpy")
def _expand(p, at, pair, layer, columns, segment, part):
    _, b, rank, gain, shift = pair
    begin, width = columns
    _, first, stop = segment
    vectors, size = (width + LANES - 1) // LANES, at.number_bytes
    low, high = min(width, vectors * part // at.parts * LANES), min(width, vectors * (part + 1) // at.parts * LANES)
    block = _BLOCK if stop - first >= 2 * ROWS else width
    while low < high:
        count = min(block, high - low)
        weights, change = (b + low * size, width * size), (gain + low * size, shift + low * size)
        row = first
        while row < stop:
            rows = ROWS if row + ROWS <= stop else 1
            factors = at.shrunk + row * at.shrunk_bytes + layer * at.max_rank * 4
            y = at.y + row * at.y_bytes + (begin + low) * size
            if rows == 1 and gain:
                expand_dora_1(p, y, factors, rank, weights, change, count)
            elif rows == 1:
                expand_1(p, y, factors, rank, weights, change, count)
            elif gain:
                expand_dora_4(p, y, factors, rank, weights, change, count)
            else:
                expand_4(p, y, factors, rank, weights, change, count)
            row += rows
        low += count


@njit(fastmath=True, error_model="numpy")
def _task(at, index):
    """A task's part, its layer, and what concerns it: the slot's pair there, the layer's columns, the segment."""
    part, index = index % at.parts, index // at.parts
    layer = index % at.layer_count
    line = carray(int64_pointer(at.segments), (at.segment_count, SEGMENT_FIELDS))[index // at.layer_count]
    of_layer = carray(int64_pointer(at.layers), (at.layer_count, _COLUMN_FIELDS))[layer]
    held = carray(int64_pointer(at.slots + (line[0] * at.layer_count + layer) * PAIR_FIELDS * 8), (PAIR_FIELDS,))
    pair = (held[0], held[1], held[2], held[3], held[4])
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
    # Others may still be at it: not for long, unless they have lost their core.
    looks = 0
    while load_counter(counters + _SHRUNK) < tasks:
        looks += 1
        if looks > _SPINS:
            yield_thread()
    while True:
        index = fetch_add(counters + _EXPANDS)
        if index >= tasks:
            return
        part, layer, pair, columns, segment = _task(at, index)
        if pair[2]:
            _expand(p, at, pair, layer, columns, segment, part)
