"""Attention on the CPU: rows of a few tokens by the compiled kernel, longer chunks as matrix products in torch.

flat batch   │ decode rows, one token each │ short chunk │ chunk │ ...
               kernel.py                                   chunks.py
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.attention.cpu.chunks import Chunk, chunk_from_row
from worker.engine.attention.cpu.codes import write_codes
from worker.engine.attention.cpu.intrinsics import heads_at_once
from worker.engine.attention.cpu.kernel import attention_parameters, compile_attention, scratch_floats
from worker.engine.attention.kv_cache import KvCache
from worker.engine.attention.paged import LayerCall
from worker.engine.device.cpu import threads
from worker.engine.device.dtypes import dtype_name
from worker.engine.scheduling.sequence import Batch

# Maximum of a row for the kernel: this many tokens, or this many tokens times the last one's positions. Above both,
# matrix products are faster.
_KERNEL_TOKENS, _KERNEL_PAIRS = 31, 16_000
# Minimum number of tasks of about equal size per thread: with two, no thread waits long for the last one.
_TASKS_PER_THREAD = 2


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step's short rows as `tasks` [n, TASK_FIELDS] over their block `tables` (see kernel.py), and its chunks.

    `rows` and `scores` are the maxima of a task, per query head of a key head.
    """

    tasks: NDArray[np.int64]
    tables: NDArray[np.int64]
    counters: NDArray[np.int64]
    addresses: tuple[int, int, int]
    rows: int
    scores: int
    chunks: tuple[Chunk, ...]

    def attend(self, call: LayerCall, cache: KvCache, out: Tensor | None = None) -> Tensor:
        """See AttentionPlan; `out` takes the result where it is given."""
        query = call.query if call.query.stride(-1) == 1 else call.query.contiguous()
        if out is None:
            out = query.new_empty(*query.shape[:2], call.value.shape[-1])
        if len(self.tasks):
            self._attend_short(call, query, cache, out)
        for chunk in self.chunks:
            chunk.attend(call, cache, out[chunk.first : chunk.stop])
        return out

    def quantize(self, call: LayerCall, slots: Tensor, cache: KvCache) -> None:
        """See AttentionPlan."""
        write_codes(call, slots, cache)

    def _attend_short(self, call: LayerCall, query: Tensor, cache: KvCache, out: Tensor) -> None:
        keys, values = cache.slots[call.layer]
        _, kv_heads, key_dim = keys.shape
        value_dim = values.shape[2]
        shared = query.shape[1] // kv_heads
        floats = shared * (self.scores + self.rows * scratch_floats(key_dim, value_dim))
        scratch = cache.workspace.address(floats * torch.get_num_threads())
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        number, kept = query.element_size(), keys.element_size()
        key_scales, value_scales = (
            (scales.data_ptr() for scales in cache.scales[call.layer]) if cache.scales else (0, 0)
        )
        kernel = _kernel(shared, key_dim, value_dim, dtype_name(query.dtype), dtype_name(keys.dtype))
        self.counters[:] = 0
        addresses = self.addresses
        parameters = kernel.layout.pack(
            *(query.data_ptr(), query.stride(0) * number, query.stride(1) * number),
            *(out.data_ptr(), out.stride(0) * number, out.stride(1) * number),
            *(keys.data_ptr(), values.data_ptr(), key_dim * kept, value_dim * kept, key_scales, value_scales),
            *(cache.block_size, 0 if sinks is None else sinks.data_ptr(), call.window or 0),
            *(addresses[0], len(self.tasks), addresses[1], addresses[2], scratch, floats * 4),
            *(kv_heads, shared, kernel.group, key_dim, value_dim, call.scaling, call.softcap or 0.0),
        )
        threads.run_on_all_threads(kernel.address, parameters)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A compiled kernel: the `layout` of its parameters, and `compiled`, which keeps the code at `address` alive."""

    layout: Struct
    group: int
    address: int
    compiled: Any


@cache
def _kernel(shared: int, key_dim: int, value_dim: int, kind: str, kept: str) -> _Kernel:
    kernel = compile_attention(attention_parameters(shared, key_dim, value_dim, kind, kept))
    return _Kernel(Struct("=26q2f"), heads_at_once(shared, key_dim), kernel.address, kernel)


@dataclass(frozen=True, slots=True)
class _Short:
    """A row for the kernel: its first token in the flat batch, the number of tokens, and the position of the first."""

    first: int
    count: int
    start: int
    blocks: Ids[int]


def cpu_plan(batch: Batch, cache: KvCache) -> CpuPlan:
    """Lay out the attention of a batch."""
    short: list[_Short] = []
    chunks: list[Chunk] = []
    first = 0
    for row in batch.rows:
        end = row.start + row.count
        if row.count <= _KERNEL_TOKENS or row.count * end <= _KERNEL_PAIRS:
            blocks = row.sequence.block_table[: -(-end // cache.block_size)]
            short.append(_Short(first, row.count, row.start, blocks))
        else:
            chunks.append(chunk_from_row(row, first, cache))
        first += row.count
    return _plan(short, tuple(chunks), cache)


def decode_plan(tables: Ids[Ids[int]], positions: Ids[int], cache: KvCache) -> CpuPlan:
    """Lay out a step of one token for each block table, at these positions."""
    short = [
        _Short(index, 1, position, table[: position // cache.block_size + 1])
        for index, (table, position) in enumerate(zip(tables, positions, strict=True))
    ]
    return _plan(short, (), cache)


def _plan(short: Ids[_Short], chunks: tuple[Chunk, ...], cache: KvCache) -> CpuPlan:
    kv_heads = cache.slots[0][0].shape[1]
    work = [row.count * (row.start + row.count) for row in short]
    # A row is one task, unless it is so long that other threads would wait for it: then one task per key head.
    share = sum(work) / (_TASKS_PER_THREAD * torch.get_num_threads())
    tasks: list[tuple[int, ...]] = []
    tables: list[int] = []
    rows = scores = 0
    # The largest first, so that no thread starts a large task last.
    for index in sorted(range(len(short)), key=work.__getitem__, reverse=True):
        row, heads = short[index], kv_heads if work[index] <= share else 1
        span = len(row.blocks) * cache.block_size
        tasks += [
            (row.first, row.count, row.start, len(tables), head, heads, span) for head in range(0, kv_heads, heads)
        ]
        tables += row.blocks
        rows, scores = max(rows, heads * row.count), max(scores, heads * row.count * span)
    lines, table, counters = np.array(tasks, np.int64), np.array(tables, np.int64), np.zeros(2, np.int64)
    addresses = lines.ctypes.data, table.ctypes.data, counters.ctypes.data
    return CpuPlan(lines, table, counters, addresses, rows, scores, chunks)
