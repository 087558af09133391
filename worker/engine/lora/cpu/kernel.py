"""The CPU's LoRA kernel: adds each row's own adapter to a group of layers, reading A and B in host memory in place.

torch's products of a few rows and ranks spend most of their time in calls, and gathering the adapters of a step first
would read and write all of their weights once more. This kernel reads each weight once for every ROWS rows of its
adapter, in one call for each group of layers with the same input:

    for each task (rows of one adapter, layer of the group, part of the ranks), taken by the next free thread:
        shrunk[row, layer, rank] = x[row] . A[rank]                         x [rows, in_features], A [rank, in_features]
    when all of these are done, for each task (rows of one adapter, layer of the group, part of the columns):
        y[row, columns] += sum over ranks of shrunk[row, layer, rank] * B[rank, columns]        B [rank, out_features]

With DoRA (see dora.py) y is first rescaled: y + gain * y + shift. Sums are float32, and y is rounded once. A row's bits
do not depend on the other rows of the step.
"""

# numba compiles these functions from their bytecode, without annotations, so mypy has no types to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from functools import cache
from typing import Any

from numba import carray

from worker.engine.device.cpu import compilation
from worker.engine.device.cpu.counters import fetch_add, wait_for
from worker.engine.device.cpu.llvm import KINDS, LANES, int64_pointer, kernel_part
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
def compile_lora(kind: str) -> Any:
    """Compile the kernel for a dtype in KINDS. Threads called with the same zeroed `counters` share the tasks."""
    return compilation.compile_kernel(
        _apply, compilation.parameter_dtype(_INTEGERS.split(), [], {"of_kind": KINDS[kind]}), intrinsics
    )


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


@kernel_part(fastmath=True)
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
