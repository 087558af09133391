"""The CPU's attention kernel for few tokens over many keys: reads keys and values in their blocks, in place.

torch would first gather a sequence's blocks, one more read and write of all keys and values, and then multiply matrices
of a few rows, for which its products are slow. This kernel, compiled by numba for one shape, reads each key once:

    for each task (some tokens of a sequence, some key heads), taken by the next free thread:
        scores[head, token, position] = scaling * query . key               block after block
        weights = exp(scores - max), in place; factor = 1 / sum of weights
        out[token, head] = factor * sum of weights * values                 block after block

query, out [tokens, heads, dim]; keys, values [slots, kv_heads, dim], of int8 with scales [slots, kv_heads]: scores and
weights are multiplied by them. All sums are float32. The formulas of softcap and sinks are those of
worker.engine.attention.paged.LayerCall. Head dims, the number of query heads per key head, the dtype and that of kept
keys and values are compile-time constants in the type of the kernel's parameters. Strides are in bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types

from worker.engine.kernels.compilation import Kernel, compile_kernel
from worker.engine.kernels.llvm import (
    EXP,
    F32,
    FAST,
    I32,
    KINDS,
    LARGEST_EXPONENT,
    LN2,
    LOG2_E,
    broadcast,
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
    sum_lanes,
    vector_pieces,
)

# Maximum number of elements of a product that is unrolled, to bound the code's size and its compile time.
_UNROLLED = 2048


def heads_at_once(shared: int, dim: int) -> int:
    """Return the largest divisor of `shared` whose heads, of `dim` elements each, are unrolled together."""
    return next(
        heads for heads in range(shared, 0, -1) if heads == 1 or (shared % heads == 0 and heads * dim <= _UNROLLED)
    )


@emits()
def score_rows(b, p, queries, key, scale, scores, stride):
    """Compute scores[row * stride] = queries[row] . key for heads_at_once rows; queries are float32.

    A key of int8 is multiplied by the float32 at `scale`.
    """
    dim, kind = p.constant("of_key_dim"), p.constant("of_kept")
    rows = heads_at_once(p.constant("of_shared"), dim)

    factor = load(b, scale, 0, F32, 4) if kind == KINDS["int8"] else None
    keys = [(first, lanes, load_as_float32(b, kind, key, first, lanes)) for first, lanes in vector_pieces(dim)]
    for row in range(rows):
        sums: dict[int, Any] = {}
        for first, lanes, piece in keys:
            product = b.fmul(load_floats(b, queries, row * dim + first, lanes), piece, flags=FAST)
            sums[lanes] = b.fadd(sums[lanes], product, flags=FAST) if lanes in sums else product
        total = ir.Constant(F32, 0.0)
        for lanes, part in sums.items():
            total = b.fadd(total, sum_lanes(b, part, lanes), flags=FAST)
        if factor is not None:
            total = b.fmul(total, factor, flags=FAST)
        store(b, total, b.add(scores, b.mul(stride, int64(row))), 0, 4)


def _adding_values(positions: int) -> Any:
    @emits()
    def add_values(b, p, sums, weights, stride, value, value_stride, scale, scale_stride):
        """Compute sums[row] += weights[row * stride + i] * value[i * value_stride] for heads_at_once rows and all i.

        Values of int8 are multiplied by the float32 at scale[i * scale_stride].
        """
        dim, kind = p.constant("of_value_dim"), p.constant("of_kept")
        rows = heads_at_once(p.constant("of_shared"), p.constant("of_key_dim"))

        values = [b.add(value, b.mul(value_stride, int64(at))) for at in range(positions)]
        of_rows = [b.add(weights, b.mul(stride, int64(row))) for row in range(rows)]
        factors = [[load(b, row, 4 * at, F32, 4) for at in range(positions)] for row in of_rows]
        if kind == KINDS["int8"]:
            scales = [load(b, b.add(scale, b.mul(scale_stride, int64(at))), 0, F32, 4) for at in range(positions)]
            factors = [
                [b.fmul(factor, of, flags=FAST) for factor, of in zip(row, scales, strict=True)] for row in factors
            ]
        for first, lanes in vector_pieces(dim):
            pieces = [load_as_float32(b, kind, at, first, lanes) for at in values]
            for row in range(rows):
                total = load_floats(b, sums, row * dim + first, lanes)
                for factor, piece in zip(factors[row], pieces, strict=True):
                    total = b.fadd(total, b.fmul(broadcast(b, factor, lanes), piece, flags=FAST), flags=FAST)
                store(b, total, sums, 4 * (row * dim + first), 4)

    return add_values


add_value, add_four_values = _adding_values(1), _adding_values(4)


@emits()
def widen_query(b, p, wide, numbers, factor):
    """Convert a query to float32, multiplied by a factor."""
    dim, kind = p.constant("of_key_dim"), p.constant("of_kind")

    for first, lanes in vector_pieces(dim):
        product = b.fmul(load_as_float32(b, kind, numbers, first, lanes), broadcast(b, factor, lanes), flags=FAST)
        store(b, product, wide, 4 * first, 4)


@emits()
def store_attended(b, p, numbers, wide, factor):
    """Convert a head's sum of values, multiplied by a factor, to the kernel's dtype."""
    dim, kind = p.constant("of_value_dim"), p.constant("of_kind")
    size = kind_bytes(kind)

    for first, lanes in vector_pieces(dim):
        product = b.fmul(load_floats(b, wide, first, lanes), broadcast(b, factor, lanes), flags=FAST)
        store(b, round_to_kind(b, kind, product, lanes), numbers, size * first, size)


@emits(types.float32)
def power_of_two(b, exponent):
    """Return 2 ** exponent as a float32, for exponents from -126 to 127."""
    biased = b.add(b.trunc(exponent, I32), ir.Constant(I32, 127))
    return b.bitcast(b.shl(biased, ir.Constant(I32, 23)), F32)


# 64-bit integers of a task: its first token in the flat batch, the number of tokens, the position of the first, the
# index in `tables` where its block table begins, its first key head, the number of key heads, and the positions
# allocated for a row of scores.
TASK_FIELDS = 7
_INTEGERS = (
    "query query_token query_head out out_token out_head keys values key_bytes value_bytes key_scales value_scales "
    "block_size sinks window tasks task_count tables counters scratch scratch_bytes kv_heads shared group key_dim "
    "value_dim"
)


@cache
def compile_attention(shared: int, key_dim: int, value_dim: int, kind: str, stored: str) -> Kernel:
    """Compile the kernel. Threads called with the same two zeroed `counters` share the tasks.

    `shared` is the number of query heads per key head; queries and outputs are of dtype `kind`, keys and values of
    `stored`. 0 for the address of `sinks` (float32 [heads]), for `window` and for `softcap` means none.
    """
    dims = {"of_shared": shared, "of_key_dim": key_dim, "of_value_dim": value_dim}
    return compile_kernel(
        _attend, dims | {"of_kind": KINDS[kind], "of_kept": KINDS[stored]}, _INTEGERS, "scaling softcap"
    )


def scratch_floats(key_dim: int, value_dim: int) -> int:
    """Return the scratch float32 of a token's head, besides its scores: its query, its sum of values, and a factor."""
    return key_dim + value_dim + 1


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


@kernel_part(fastmath=True)
def _first_seen(position, window):
    return max(0, position + 1 - window) if window > 0 else 0


@kernel_part(fastmath=True)
def _seeing(position, start, count, window):
    """Return the range [first, stop) of a task's tokens that attend to a position."""
    behind = position - start + window
    return max(0, position - start), min(count, behind) if window > 0 else count


@kernel_part(fastmath=True)
def _score(p, at, task, table, scores, queries):
    """Compute the scores of a task's tokens and heads."""
    _, count, start, _, head, heads, span = task
    # Copied to variables: otherwise the compiler reloads them after each store, which might alias them.
    size, window, shared, group = at.block_size, at.window, at.shared, at.group
    key_bytes, query_bytes, kv_heads = at.key_bytes, at.key_dim * 4, at.kv_heads
    step, scale_step = kv_heads * key_bytes, kv_heads * 4
    first = _first_seen(start, window)
    first_block = first // size
    for block in range(first_block, (start + count - 1) // size + 1):
        begin = block * size
        low = max(first, begin)
        place = (table[block] * size + low - begin) * kv_heads + head
        key, scale = at.keys + place * key_bytes, at.key_scales + place * 4
        for position in range(low, min(start + count, begin + size)):
            first_token, end_token = _seeing(position, start, count, window)
            column = scores + (position - first_block * size) * 4
            for h in range(heads):
                for row in range((h * count + first_token) * shared, (h * count + end_token) * shared, group):
                    query, of_row = queries + row * query_bytes, column + row * span * 4
                    score_rows(p, query, key + h * key_bytes, scale + h * 4, of_row, span * 4)
            key += step
            scale += scale_step


@kernel_part(fastmath=True)
def _sum_values(p, at, task, table, weights, sums):
    """Compute the weighted sums of values of a task's tokens and heads."""
    _, count, start, _, head, heads, span = task
    size, window, shared, group = at.block_size, at.window, at.shared, at.group
    value_bytes, sum_bytes, kv_heads = at.value_bytes, at.value_dim * 4, at.kv_heads
    first = _first_seen(start, window)
    first_block = first // size
    step, scale_step = kv_heads * value_bytes, kv_heads * 4
    for block in range(first_block, (start + count - 1) // size + 1):
        position, end = max(first, block * size), min(start + count, block * size + size)
        place = (table[block] - block) * size * kv_heads + head
        values, scales = at.values + place * value_bytes, at.value_scales + place * 4
        while position < end:
            first_token, end_token = _seeing(position, start, count, window)
            # Four positions at a time where the same tokens attend to all four.
            four = position + 4 <= end and (first_token, end_token) == _seeing(position + 3, start, count, window)
            value, scale = values + position * step, scales + position * scale_step
            column = weights + (position - first_block * size) * 4
            for h in range(heads):
                for row in range((h * count + first_token) * shared, (h * count + end_token) * shared, group):
                    of_row, weight = sums + row * sum_bytes, column + row * span * 4
                    if four:
                        add_four_values(
                            p, of_row, weight, span * 4, value + h * value_bytes, step, scale + h * 4, scale_step
                        )
                    else:
                        add_value(p, of_row, weight, span * 4, value + h * value_bytes, step, scale + h * 4, scale_step)
            position += 4 if four else 1


@kernel_part(fastmath=True)
def _weigh_scores(task, scores, factors, block_size, window, shared, softcap, sinks):
    """Replace the scores of a task's tokens and heads by weights, without the factors, which go to `factors`.

    This function knows no shape, so that it is compiled once for all kernels of a process.
    """
    _, count, start, _, head, heads, span = task
    first_position = _first_seen(start, window) // block_size * block_size
    for h in range(heads):
        for t in range(count):
            low = _first_seen(start + t, window)
            for g in range(shared):
                row = (h * count + t) * shared + g
                seen = carray(float32_pointer(scores + (row * span + low - first_position) * 4), (start + t + 1 - low,))
                sink = sinks[(head + h) * shared + g] if len(sinks) else np.float32(0.0)
                factors[row] = _softmax(seen, softcap, sink, len(sinks) != 0)


@kernel_part(fastmath=True)
def _run(p, at, task, scratch):
    token, count, start, table_at, head, heads, span = task
    shared = at.shared
    rows = heads * count * shared
    queries = scratch + rows * span * 4
    sums = queries + rows * at.key_dim * 4
    table = carray(int64_pointer(at.tables + table_at * 8), (start + count,))
    for h in range(heads):
        for t in range(count):
            for g in range(shared):
                query = at.query + (token + t) * at.query_token + ((head + h) * shared + g) * at.query_head
                widen_query(p, queries + ((h * count + t) * shared + g) * at.key_dim * 4, query, at.scaling)
    _score(p, at, task, table, scratch, queries)
    factors = carray(float32_pointer(sums + rows * at.value_dim * 4), (rows,))
    sinks = carray(float32_pointer(at.sinks), (at.kv_heads * shared if at.sinks else 0,))
    _weigh_scores(task, scratch, factors, at.block_size, at.window, shared, at.softcap, sinks)
    zeros = carray(float32_pointer(sums), (rows * at.value_dim,))
    for i in range(len(zeros)):
        zeros[i] = np.float32(0.0)
    _sum_values(p, at, task, table, scratch, sums)
    for h in range(heads):
        for t in range(count):
            for g in range(shared):
                row = (h * count + t) * shared + g
                out = at.out + (token + t) * at.out_token + ((head + h) * shared + g) * at.out_head
                store_attended(p, out, sums + row * at.value_dim * 4, factors[row])


def _attend(p):
    at = carray(p, 1)[0]
    scratch = at.scratch + fetch_add(at.counters + 8) * at.scratch_bytes
    tasks = carray(int64_pointer(at.tasks), (at.task_count, TASK_FIELDS))
    while True:
        index = fetch_add(at.counters)
        if index >= at.task_count:
            return
        line = tasks[index]
        task = (line[0], line[1], line[2], line[3], line[4], line[5], line[6])
        _run(p, at, task, scratch)
