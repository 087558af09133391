"""Attention on the CPU: decodes and prompts by one compiled kernel, kernels/attention.py.

    flat batch   │ decode rows, one token each │ chunk, cut into tasks of a few tokens │ chunk │ ...

A further kernel, compiled for one shape, writes keys and values into a KV cache of int8:

    for each token and head:
        scale = largest magnitude / 127
        code = number / scale, rounded to nearest, ties to even

The division is IEEE's, as in the kernel for CUDA, so that equal numbers have equal codes everywhere. One thread writes:
a step's keys and values are few numbers.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray
from numpy.typing import NDArray
from torch import Tensor

from loraplex.kernels.attention import compile_attention, own_parameters, scratch_floats, span_of
from loraplex.kernels.attention_products import fastest_products
from loraplex.kernels.compilation import Kernel, compile_kernel
from loraplex.kernels.llvm import (
    F32,
    I8,
    I32,
    KINDS,
    ROUNDING,
    broadcast,
    emits,
    fold_lanes,
    int64_pointer,
    load_as_float32,
    store,
    vector_of,
    vector_pieces,
    vector_type,
)
from loraplex.worker.engine.attention.paged import KvCache, LayerCall, RowBlocks
from loraplex.worker.engine.device import dtype_name

_INTEGERS = (
    "keys key_token key_head values value_token value_head slots tokens kv_heads key_codes value_codes key_scales "
    "value_scales key_dim value_dim"
)
# Bits of the smallest magnitude that a scale is made of, 2 ** -119: below it a scale would not be a normal number.
_LEAST_BITS = (127 - 119) << 23


@cache
def _code_kernel(key_dim: int, value_dim: int, kind: str) -> Kernel:
    return compile_kernel(_write, {"of_key_dim": key_dim, "of_value_dim": value_dim, "of_kind": KINDS[kind]}, _INTEGERS)


def _storing(dim_field: str) -> Any:
    @emits()
    def store_codes(b, p, numbers, codes, scale):
        """Store a head's numbers as codes, and their scale."""
        dim, kind = p.constant(dim_field), p.constant("of_kind")
        parts = [(first, lanes, load_as_float32(b, kind, numbers, first, lanes)) for first, lanes in vector_pieces(dim)]
        magnitudes = [(lanes, _magnitude_bits(b, part, lanes)) for _, lanes, part in parts]
        most = ir.Constant(I32, _LEAST_BITS)

        def larger(one, other):
            return b.select(b.icmp_signed(">", one, other), one, other)

        for lanes, bits in magnitudes:
            most = larger(most, fold_lanes(b, bits, lanes, larger))
        factor = b.fdiv(b.bitcast(most, F32), ir.Constant(F32, 127.0))
        store(b, factor, scale, 0, 4)
        for first, lanes, part in parts:
            # Only the lowest byte is kept, in which ROUNDING has no bits.
            rounded = b.fadd(b.fdiv(part, broadcast(b, factor, lanes)), vector_of(F32, ROUNDING, lanes))
            bits = b.bitcast(rounded, vector_type(I32, lanes))
            store(b, b.trunc(bits, vector_type(I8, lanes)), codes, first, 1)

    return store_codes


def _magnitude_bits(b, part, lanes):
    """Return the bits of magnitudes: as integers they are ordered as the numbers are, infinity above, NaN above all."""
    return b.and_(b.bitcast(part, vector_type(I32, lanes)), vector_of(I32, 0x7FFFFFFF, lanes))


_store_key, _store_value = _storing("of_key_dim"), _storing("of_value_dim")


def _write(p):
    at = carray(p, 1)[0]
    slots = carray(int64_pointer(at.slots), (at.tokens,))
    for token in range(at.tokens):
        for head in range(at.kv_heads):
            place = slots[token] * at.kv_heads + head
            key = at.keys + token * at.key_token + head * at.key_head
            _store_key(p, key, at.key_codes + place * at.key_dim, at.key_scales + place * 4)
            value = at.values + token * at.value_token + head * at.value_head
            _store_value(p, value, at.value_codes + place * at.value_dim, at.value_scales + place * 4)


# Maximum number of scores of a task, rows times positions: they stay in a core's second-level cache.
_TASK_SCORES = 128 * 1024
# Maximum number of tokens of a task: more would gain nothing, and leave threads without work at the end.
_TASK_TOKENS = 64
# Minimum number of tasks of about equal size per thread: with two, no thread waits long for the last one.
_TASKS_PER_THREAD = 2


@dataclass(frozen=True, slots=True)
class _Tasks:
    """A step's work for the kernel: `lines` [n, TASK_FIELDS], and the maxima of a task."""

    lines: NDArray[np.int64]
    address: int
    rows: int
    scores: int
    positions: int


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step's rows over their block `tables`, which begin at `table_places`.

    `addresses` are those of the tables and of the cache's counters.
    """

    rows: Ids[RowBlocks]
    tables: NDArray[np.int64]
    table_places: Ids[int]
    addresses: tuple[int, int]
    kv_heads: int
    # By the number of query heads that share a key head.
    tasks: dict[int, _Tasks] = field(default_factory=dict)

    def attend(self, call: LayerCall, cache: KvCache, out: Tensor | None = None) -> Tensor:
        """See AttentionPlan; `out` takes the result where it is given."""
        query = call.query if call.query.stride(-1) == 1 else call.query.contiguous()
        keys, values = cache.slots[call.layer]
        (_, kv_heads, key_dim), value_dim = keys.shape, values.shape[2]
        if out is None:
            out = query.new_empty(*query.shape[:2], value_dim)
        kind, shared = dtype_name(query.dtype), query.shape[1] // kv_heads
        tasks, products = self.tasks_of(shared), fastest_products(key_dim, value_dim, kind)
        floats = scratch_floats(tasks.rows, tasks.scores, tasks.positions, key_dim, value_dim, products)
        scratch = cache.workspace.address(floats * torch.get_num_threads())
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        number, size = query.element_size(), keys.element_size()
        key_scales, value_scales = (
            (scales.data_ptr() for scales in cache.scales[call.layer]) if cache.scales else (0, 0)
        )
        kernel = compile_attention(key_dim, value_dim, kind, dtype_name(keys.dtype), products)
        cache.counters[:] = 0
        kernel.run(
            *(query.data_ptr(), query.stride(0) * number, query.stride(1) * number),
            *(out.data_ptr(), out.stride(0) * number, out.stride(1) * number),
            *(keys.data_ptr(), values.data_ptr(), key_dim * size, value_dim * size, key_scales, value_scales),
            *(cache.block_size, 0 if sinks is None else sinks.data_ptr(), call.window or 0),
            *(tasks.address, len(tasks.lines), *self.addresses, scratch, floats * 4, kv_heads, shared),
            *(*own_parameters(key_dim, value_dim, products), call.scaling, call.softcap or 0.0),
        )
        return out

    def quantize(self, call: LayerCall, slots: Tensor, cache: KvCache) -> None:
        """See AttentionPlan."""
        key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (call.key, call.value))
        (key_codes, value_codes), (key_scales, value_scales) = cache.slots[call.layer], cache.scales[call.layer]
        tokens, kv_heads, key_dim = key.shape
        number = key.element_size()
        _code_kernel(key_dim, value.shape[-1], dtype_name(key.dtype)).run_alone(
            *(key.data_ptr(), key.stride(0) * number, key.stride(1) * number),
            *(value.data_ptr(), value.stride(0) * number, value.stride(1) * number),
            *(slots.data_ptr(), tokens, kv_heads, key_codes.data_ptr(), value_codes.data_ptr()),
            *(key_scales.data_ptr(), value_scales.data_ptr(), key_dim, value.shape[-1]),
        )

    @property
    def stop(self) -> int:
        """Return the position behind the last one of all rows."""
        return max(row.start + row.count for row in self.rows)

    def tasks_of(self, shared: int) -> _Tasks:
        """Return the tasks, where so many query heads share a key head."""
        if shared not in self.tasks:
            self.tasks[shared] = self._cut(shared)
        return self.tasks[shared]

    def _cut(self, shared: int) -> _Tasks:
        pieces, first = [], 0
        for row, table in zip(self.rows, self.table_places, strict=True):
            tokens = max(1, min(_TASK_TOKENS, _TASK_SCORES // (shared * span_of(row.start + row.count))))
            pieces += [
                (first + begin, min(tokens, row.count - begin), row.start + begin, table)
                for begin in range(0, row.count, tokens)
            ]
            first += row.count
        work = [count * (start + count) for _, count, start, _ in pieces]
        # A piece is one task, unless it is so long that other threads would wait for it: then one task per key head.
        share = sum(work) / (_TASKS_PER_THREAD * torch.get_num_threads())
        tasks: list[tuple[int, ...]] = []
        most = [0, 0, 0]
        # The largest first, so that no thread starts a large task last.
        for index in sorted(range(len(pieces)), key=work.__getitem__, reverse=True):
            _, count, start, _ = pieces[index]
            rows, span = count * shared, span_of(start + count)
            whole = work[index] <= share and self.kv_heads * rows * span <= _TASK_SCORES
            heads = self.kv_heads if whole else 1
            tasks += [(*pieces[index], head, heads) for head in range(0, self.kv_heads, heads)]
            most = list(map(max, most, (heads * rows, heads * rows * span, start + count)))
        lines = np.array(tasks, np.int64)
        return _Tasks(lines, lines.ctypes.data, *most)


def cpu_plan(rows: Ids[RowBlocks], cache: KvCache) -> CpuPlan:
    """Lay out the attention of a step's rows."""
    tables: list[int] = []
    places: list[int] = []
    for row in rows:
        places.append(len(tables))
        tables += row.blocks
    table, kv_heads = np.array(tables, np.int64), cache.slots[0][0].shape[1]
    return CpuPlan(rows, table, places, (table.ctypes.data, cache.counters.ctypes.data), kv_heads)
