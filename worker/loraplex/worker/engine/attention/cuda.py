"""Attention on CUDA: a step's decode rows and chunks, and the way of keys and values into a KV cache of int8.

A kernel writes them: each token's head with a scale of its own. The arithmetic is that of the CPU's kernel (cpu.py), to
the bit; the attention itself is in kernels.py. Imported only where there is Triton.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex.worker.engine.attention.kernels import (
    decode_calls,
    prefill_calls,
    prefill_tiles,
    tile_size,
    tile_tokens,
)
from loraplex.worker.engine.attention.paged import KvCache, LayerCall, RowBlocks
from loraplex.worker.engine.device import KernelCall, upload

# Bits of the smallest magnitude that a scale is made of, 2 ** -119: below it a scale would not be a normal number.
_LEAST_BITS: tl.constexpr = tl.constexpr((127 - 119) << 23)
# Added to a number below 2 ** 22 it leaves the nearest whole number in the lowest bits.
_ROUNDING: tl.constexpr = tl.constexpr(1.5 * 2**23)


@triton.jit
def _store_codes(numbers, codes, scale, DIM: tl.constexpr, DIM_TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    dims = tl.arange(0, DIM_TILE)
    x = tl.load(numbers + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    # Bits of magnitudes, read as integers, keep the numbers' order: infinity above, NaN above all.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most = tl.maximum(tl.max(bits, 0), _LEAST_BITS).to(tl.float32, bitcast=True)
    factor = tl.math.div_rn(most, 127.0)
    tl.store(scale, factor)
    rounded = tl.math.div_rn(x, tl.zeros([DIM_TILE], tl.float32) + factor) + _ROUNDING
    tl.store(codes + dims, rounded.to(tl.int32, bitcast=True).to(tl.int8), mask=dims < DIM)


@triton.jit
def write_heads(  # type: ignore[no-untyped-def]
    keys, values, slots, key_codes, value_codes, key_scales, value_scales,
    key_stride, key_head_stride, value_stride, value_head_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr,
):  # fmt: skip
    """Write a token's key and value of one head. Grid: token, key head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.load(slots + token).to(tl.int64) * KV_HEADS + head
    key = keys + token * key_stride + head * key_head_stride
    _store_codes(key, key_codes + place * DIM, key_scales + place, DIM, DIM_TILE)
    value = values + token * value_stride + head * value_head_stride
    _store_codes(value, value_codes + place * VALUE_DIM, value_scales + place, VALUE_DIM, VALUE_TILE)


def write_call(call: LayerCall, slots: Tensor, cache: KvCache) -> KernelCall:
    """Return the launch that writes a call's keys and values into slots [tokens] of a cache of int8."""
    key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (call.key, call.value))
    (key_codes, value_codes), (key_scales, value_scales) = cache.slots[call.layer], cache.scales[call.layer]
    tokens, kv_heads, dim = key.shape
    value_dim = value.shape[-1]
    return KernelCall(
        write_heads,
        (tokens, kv_heads),
        {
            "keys": key, "values": value, "slots": slots, "key_codes": key_codes, "value_codes": value_codes,
            "key_scales": key_scales, "value_scales": value_scales,
            "key_stride": key.stride(0), "key_head_stride": key.stride(1),
            "value_stride": value.stride(0), "value_head_stride": value.stride(1),
        },
        {
            "KV_HEADS": kv_heads, "DIM": dim, "DIM_TILE": tile_size(dim), "VALUE_DIM": value_dim,
            "VALUE_TILE": tile_size(value_dim),
        },
        warps=1,
        stages=1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode rows, first in the flat batch: block tables [rows, blocks] int32 and positions [rows] int64.

    Entries of a table beyond the row's position are never read.
    """

    tables: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Chunks: block tables [chunks, blocks] int32; spans of (first token in the flat batch, its position, count)."""

    tables: Tensor
    spans: tuple[tuple[int, int, int], ...]
    # The spans cut into tiles, by their maximum number of tokens; made by the first layer that needs them.
    tiles: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Implements AttentionPlan for a step's decode rows and chunks."""

    decodes: DecodeRows | None
    chunks: ChunkRows | None

    def attend(self, call: LayerCall, cache: KvCache) -> Tensor:
        """See AttentionPlan."""
        out = call.query.new_empty(*call.query.shape[:2], call.value.shape[-1])
        for kernel in self.kernels(call, cache, out):
            kernel.launch()
        return out

    def quantize(self, call: LayerCall, slots: Tensor, cache: KvCache) -> None:
        """See AttentionPlan."""
        write_call(call, slots, cache).launch()

    def kernels(self, call: LayerCall, cache: KvCache, out: Tensor) -> Sequence[KernelCall]:
        """Return the launches that compute `out` [tokens, heads, dim of the values], in order."""
        if call.query.stride(-1) != 1:
            call = replace(call, query=call.query.contiguous())
        kernels: list[KernelCall] = []
        if self.decodes is not None:
            tables = self.decodes.tables
            if cache.batch_invariant:
                longest = tables.shape[1] * cache.block_size
                kernels += prefill_calls(call, cache, tables, self.decodes.positions, longest, out)
            else:
                kernels += decode_calls(call, cache, tables, self.decodes.positions, out)
        if self.chunks is not None:
            tiles, most = self.chunks.tiles, tile_tokens(call.query.shape[1] // call.key.shape[1], out.shape[-1])
            if most not in tiles:
                tiles[most] = upload(prefill_tiles(self.chunks.spans, most), call.query.device, torch.int32)
            longest = max(start + count for _, start, count in self.chunks.spans)
            kernels += prefill_calls(call, cache, self.chunks.tables, tiles[most], longest, out)
        return kernels


def triton_plan(rows: Sequence[RowBlocks], decodes: int, cache: KvCache, device: torch.device) -> TritonPlan:
    """Lay out the attention of a step's rows, the first `decodes` of which have one token each."""
    singles, longer = rows[:decodes], rows[decodes:]
    decode_rows = chunks = None
    if singles:
        positions = upload([row.start for row in singles], device)
        decode_rows = DecodeRows(_tables(singles, cache, device), positions)
    if longer:
        spans, first = [], len(singles)
        for row in longer:
            spans.append((first, row.start, row.count))
            first += row.count
        chunks = ChunkRows(_tables(longer, cache, device), tuple(spans))
    return TritonPlan(decode_rows, chunks)


def _tables(rows: Sequence[RowBlocks], cache: KvCache, device: torch.device) -> Tensor:
    tables = np.full((len(rows), max(len(row.blocks) for row in rows)), cache.scratch_block, dtype=np.int32)
    for line, row in zip(tables, rows, strict=True):
        line[: len(row.blocks)] = row.blocks
    return upload(tables, device)
