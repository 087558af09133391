"""Attention of few tokens over many keys on the CPU: straight from the blocks, compiled by numba for one shape.

torch would first gather a sequence's blocks (a read and a write of all that is read afterwards), and then multiply
matrices of a few rows, for which its products are not made. Here every key is read once, from where it lies:

    for each task (some tokens of a sequence, some key heads), by whichever thread is free:
        scores[head, token, position] = query . key         block after block
        weights = softmax(scores), in place, less the sum
        out[token, head] = sum of weights * values           block after block

All is computed in float32. A softcap and sinks are as in worker/engine/attention/paged.py.
"""

# numba compiles these functions from their bytecode: it needs no annotations, and has no types for mypy to check.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from worker.engine.attention.cpu import intrinsics
from worker.engine.attention.cpu.intrinsics import (
    add_four_values,
    add_value,
    power_of_two,
    score_rows,
    store_attended,
    widen_query,
)
from worker.engine.device.cpu import compilation
from worker.engine.device.cpu.llvm import KINDS, fetch_add, float32_pointer, int64_pointer

# Integers of a task: its first token in the flat batch, how many, the position of the first, where its block table
# begins in `tables`, its first key head, how many, and the positions that a row of scores has room for.
TASK_FIELDS = 7
_INTEGERS = (
    "query query_token query_head out out_token out_head keys values key_bytes value_bytes block_size sinks window "
    "tasks task_count tables counters scratch scratch_bytes kv_heads shared group key_dim value_dim"
)


def attention_parameters(shared: int, key_dim: int, value_dim: int, kind: str) -> np.dtype[Any]:
    """What the kernel is given: addresses, and strides in bytes; `shared` query heads have the same key head.

    0 as the address of `sinks` (float32 [heads]), as `window` and as `softcap` means none.
    """
    made_for = {"of_shared": shared, "of_key_dim": key_dim, "of_value_dim": value_dim, "of_kind": KINDS[kind]}
    return compilation.parameter_dtype(_INTEGERS.split(), ["scaling", "softcap"], made_for)


def compile_attention(given: np.dtype[Any]) -> Any:
    """The kernel for such parameters. `counters` are two zeros: threads called with the same ones share the tasks."""
    return compilation.compile_kernel(_attend, given, intrinsics)


def scratch_floats(key_dim: int, value_dim: int) -> int:
    """What a token's head needs of its own beside its scores: its query, what it attends to, and a factor."""
    return key_dim + value_dim + 1


@njit(fastmath=True, error_model="numpy", inline="always")
def _exp(x):
    """Cephes' expf: 2 ** n times a polynomial; vectors of it where it stands in a loop."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    return (y * r * r + r + np.float32(1.0)) * power_of_two(np.int64(n))


@njit(fastmath=True, error_model="numpy")
def _softmax(scores, softcap, sink, has_sink):
    """Scores become weights, but for a factor: that is returned."""
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


@njit(fastmath=True, error_model="numpy", inline="always")
def _first_seen(position, window):
    return max(0, position + 1 - window) if window > 0 else 0


@njit(fastmath=True, error_model="numpy", inline="always")
def _seeing(position, start, count, window):
    """Which of a task's tokens see a position: the first one, and the first behind them that does not."""
    behind = position - start + window
    return max(0, position - start), min(count, behind) if window > 0 else count


@njit(fastmath=True, error_model="numpy")
def _score(p, at, task, table, scores, queries):
    """Scores of a task's tokens and heads."""
    _, count, start, _, head, heads, span = task
    # In variables: a compiler must take it that what is stored might change what is behind an address.
    size, window, shared, group = at.block_size, at.window, at.shared, at.group
    key_bytes, query_bytes, kv_heads = at.key_bytes, at.key_dim * 4, at.kv_heads
    first = _first_seen(start, window)
    first_block = first // size
    for block in range(first_block, (start + count - 1) // size + 1):
        begin = block * size
        low = max(first, begin)
        key = at.keys + ((table[block] * size + low - begin) * kv_heads + head) * key_bytes
        for position in range(low, min(start + count, begin + size)):
            first_token, end_token = _seeing(position, start, count, window)
            column = scores + (position - first_block * size) * 4
            for h in range(heads):
                for row in range((h * count + first_token) * shared, (h * count + end_token) * shared, group):
                    score_rows(p, queries + row * query_bytes, key + h * key_bytes, column + row * span * 4, span * 4)
            key += kv_heads * key_bytes


@njit(fastmath=True, error_model="numpy")
def _sum_values(p, at, task, table, weights, sums):
    """Sums of the values, weighted, of a task's tokens and heads."""
    _, count, start, _, head, heads, span = task
    size, window, shared, group = at.block_size, at.window, at.shared, at.group
    value_bytes, sum_bytes, kv_heads = at.value_bytes, at.value_dim * 4, at.kv_heads
    first = _first_seen(start, window)
    first_block = first // size
    step = kv_heads * value_bytes
    for block in range(first_block, (start + count - 1) // size + 1):
        position, end = max(first, block * size), min(start + count, block * size + size)
        values = at.values + ((table[block] - block) * size * kv_heads + head) * value_bytes
        while position < end:
            first_token, end_token = _seeing(position, start, count, window)
            # Four at a time where the same tokens see all of them.
            four = position + 4 <= end and (first_token, end_token) == _seeing(position + 3, start, count, window)
            value = values + position * step
            column = weights + (position - first_block * size) * 4
            for h in range(heads):
                for row in range((h * count + first_token) * shared, (h * count + end_token) * shared, group):
                    of_row, weight = sums + row * sum_bytes, column + row * span * 4
                    if four:
                        add_four_values(p, of_row, weight, span * 4, value + h * value_bytes, step)
                    else:
                        add_value(p, of_row, weight, span * 4, value + h * value_bytes, step)
            position += 4 if four else 1


@njit(fastmath=True, error_model="numpy")
def _weigh_scores(at, task, scores, factors):
    """Scores of a task's tokens and heads become weights, each token's but for a factor."""
    _, count, start, _, head, heads, span = task
    first_position = _first_seen(start, at.window) // at.block_size * at.block_size
    shared = at.shared
    sinks = carray(float32_pointer(at.sinks), (at.kv_heads * shared,))
    for h in range(heads):
        for t in range(count):
            low = _first_seen(start + t, at.window)
            for g in range(shared):
                row = (h * count + t) * shared + g
                seen = carray(float32_pointer(scores + (row * span + low - first_position) * 4), (start + t + 1 - low,))
                sink = sinks[(head + h) * shared + g] if at.sinks else np.float32(0.0)
                factors[row] = _softmax(seen, at.softcap, sink, at.sinks != 0)


@njit(fastmath=True, error_model="numpy")
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
    _weigh_scores(at, task, scratch, factors)
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
