"""Attention on the CPU: rows of a few tokens by the compiled kernel, longer chunks as matrix products in torch.

    flat batch   │ decode rows, one token each │ short chunk │ chunk │ ...
                   kernels/attention.py                        Chunk

A chunk is many tokens of one sequence over all its positions so far. torch's scaled_dot_product_attention with a mask
takes about twice as long for more than a few scores in bfloat16: keys are the right factor of its product, and mkldnn
reorders a right factor in each call. Here keys are the left factor, and queries are processed in blocks, whose scores
stay in the CPU's caches.

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
from torch.nn.functional import scaled_dot_product_attention

from worker.engine.attention.paged import KvCache, LayerCall
from worker.engine.device import dtype_name
from worker.engine.kernels.attention import compile_attention, heads_at_once, scratch_floats
from worker.engine.kernels.compilation import Kernel, compile_kernel
from worker.engine.kernels.llvm import (
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
from worker.engine.scheduling.sequence import Batch, Row


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, call: LayerCall, sinks: Tensor | None) -> Tensor:
    """Attend with a softcap or sinks, which scaled_dot_product_attention has not.

    q [..., queries, dim]; k, v [..., positions, dim]; mask [queries, positions], additive; sinks [heads, queries]. The
    formulas are those of LayerCall.
    """
    scores = torch.matmul(q, k.transpose(-1, -2)) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, ..., None].expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(weights[..., : k.shape[-2]], v)


# Tokens of a block of queries. Measured: 32 to 128 take the same time, fewer and more are slower.
_BLOCK_TOKENS = 64
# Maximum number of scores of a key head for which one call of scaled_dot_product_attention is faster.
_ONE_CALL_SCORES = 6_000
# Minimum number of columns for a softmax over rows, which torch vectorizes by 16 columns; fewer are transposed first.
_SOFTMAX_COLUMNS = 24


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [first, stop) of the flat batch: the positions from `start` on of one sequence.

    `table` [blocks] covers all positions up to the chunk's last; None where the chunk's own keys and values are all
    that it needs: it begins its sequence, and the cache would give them back as they are.
    """

    first: int
    stop: int
    start: int
    table: Tensor | None
    # Additive masks by (first token, first position, window), made by the first layer that needs them.
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)

    def attend(self, call: LayerCall, cache: KvCache, out: Tensor) -> None:
        """Compute the chunk's attention into out [tokens, heads, dim of the values]."""
        q, keys, values = (tensor[self.first : self.stop] for tensor in (call.query, call.key, call.value))
        tokens, heads, dim = q.shape
        end = self.start + tokens
        if self.table is not None:
            keys, values = (blocks[:end] for blocks in cache.gather_blocks(call.layer, self.table))
        # Query heads that share a key head are concatenated along tokens, as if they were more tokens of one head.
        kv_heads = keys.shape[1]
        shared = heads // kv_heads
        grouped = q.view(tokens, kv_heads, shared, dim).permute(1, 2, 0, 3)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        plain = call.softcap is None and call.sinks is None
        if plain and shared * tokens * end > _ONE_CALL_SCORES:
            self._attend_blocks(call, grouped * call.scaling, keys, values, out.view(tokens, kv_heads, shared, -1))
            return
        packed, mask = grouped.flatten(1, 2), self._mask(0, tokens, 0, call).t().repeat(shared, 1)
        if plain:
            attended = scaled_dot_product_attention(
                packed[None], keys[None], values[None], attn_mask=mask, scale=call.scaling
            )
        else:
            sinks = None if call.sinks is None else call.sinks.view(kv_heads, -1).repeat_interleave(tokens, 1)
            attended = eager_attention(packed[None], keys[None], values[None], mask, call, sinks)
        ungrouped = attended.view(kv_heads, shared, tokens, -1).permute(2, 0, 1, 3)
        out.view(ungrouped.shape).copy_(ungrouped)

    def _attend_blocks(self, call: LayerCall, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Attend block by block: scaled q [kv_heads, shared, tokens, dim]; keys and values [kv_heads, end, dim]."""
        kv_heads, shared, tokens, dim = q.shape
        for first in range(0, tokens, _BLOCK_TOKENS):
            stop = min(first + _BLOCK_TOKENS, tokens)
            begin, end = self.start + first, self.start + stop
            low = 0 if call.window is None else max(0, begin - call.window + 1)
            block = q[:, :, first:stop].reshape(kv_heads, -1, dim)
            scores = torch.bmm(keys[:, low:end], block.transpose(1, 2))
            # Without a window all tokens of the block attend to all positions before it: only the rest needs a mask.
            mask = self._mask(first, stop, begin if call.window is None else low, call)
            scores[:, -len(mask) :] += mask.repeat(1, shared)
            if scores.shape[2] < _SOFTMAX_COLUMNS:
                weights = scores.transpose(1, 2).contiguous().softmax(-1)
            else:
                weights = scores.softmax(1).transpose(1, 2)
            attended = torch.bmm(weights, values[:, low:end])
            out[first:stop] = attended.view(kv_heads, shared, stop - first, -1).permute(2, 0, 1, 3)

    def _mask(self, first: int, stop: int, low: int, call: LayerCall) -> Tensor:
        """Return the additive mask [positions, tokens] of tokens [first, stop) over positions from `low` on."""
        mask = self.masks.get((first, low, call.window))
        if mask is None:
            device, end = call.query.device, self.start + stop
            keys = torch.arange(low, end, device=device)[:, None]
            queries = torch.arange(self.start + first, end, device=device)[None]
            seen = keys <= queries
            if call.window is not None:
                seen &= keys > queries - call.window
            mask = torch.zeros(seen.shape, dtype=call.query.dtype, device=device).masked_fill_(~seen, float("-inf"))
            self.masks[first, low, call.window] = mask
        return mask


def chunk_from_row(row: Row, first: int, cache: KvCache) -> Chunk:
    """Return a row as a chunk that begins at token `first` of the flat batch."""
    past = None
    if row.start or cache.scales:
        blocks = -(-(row.start + row.count) // cache.block_size)
        past = torch.tensor(row.sequence.block_table[:blocks])
    return Chunk(first, first + row.count, row.start, past)


_INTEGERS = (
    "keys key_token key_head values value_token value_head slots tokens kv_heads key_codes value_codes key_scales "
    "value_scales key_dim value_dim"
)
# Bits of the smallest magnitude that a scale is made of, 2 ** -119: below it a scale would not be a normal number.
_LEAST_BITS = (127 - 119) << 23


def write_codes(call: LayerCall, slots: Tensor, cache: KvCache) -> None:
    """Write a call's keys and values into slots [tokens] of a cache of int8."""
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


# Maximum of a row for the kernel: this many tokens, or this many tokens times the last one's positions. Above both,
# matrix products are faster.
_KERNEL_TOKENS, _KERNEL_PAIRS = 31, 16_000
# Minimum number of tasks of about equal size per thread: with two, no thread waits long for the last one.
_TASKS_PER_THREAD = 2


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step's short rows as `tasks` [n, TASK_FIELDS] over their block `tables`, and its chunks.

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
        number, size = query.element_size(), keys.element_size()
        key_scales, value_scales = (
            (scales.data_ptr() for scales in cache.scales[call.layer]) if cache.scales else (0, 0)
        )
        kernel = compile_attention(shared, key_dim, value_dim, dtype_name(query.dtype), dtype_name(keys.dtype))
        self.counters[:] = 0
        addresses = self.addresses
        kernel.run(
            *(query.data_ptr(), query.stride(0) * number, query.stride(1) * number),
            *(out.data_ptr(), out.stride(0) * number, out.stride(1) * number),
            *(keys.data_ptr(), values.data_ptr(), key_dim * size, value_dim * size, key_scales, value_scales),
            *(cache.block_size, 0 if sinks is None else sinks.data_ptr(), call.window or 0),
            *(addresses[0], len(self.tasks), addresses[1], addresses[2], scratch, floats * 4),
            *(kv_heads, shared, heads_at_once(shared, key_dim), key_dim, value_dim, call.scaling, call.softcap or 0.0),
        )


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
