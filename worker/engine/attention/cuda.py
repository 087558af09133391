"""Attention on CUDA: Triton kernels over blocks, and their launches for a step's decode rows and chunks.

Decodes are computed in splits that are combined (flash-decoding, Dao et al. 2023):

    row of length 700    │ split 0 │ split 1 │ split 2 │ ...      each: sums, total, top of its positions
    row of length 90     │ split 0 │
                           └────────── combined in split order

A row's splits depend on its length alone, so that its bits do not depend on the batch. The grid depends on the shapes
alone, so that CUDA graphs can hold it: program i of n of a row takes the splits i, i + n, i + 2n, ..., or none.

Chunks are computed over their earlier positions and their own, causal by position. Their tokens are consecutive in the
flat batch, and their keys and values are in the cache already. A program computes some tokens of one chunk for the
query heads that share a key head:

    lanes of its tile    token 0: head 0 1 2 │ token 1: head 0 1 2 │ ...

so that keys are read once for all of them, and short chunks of models with many heads per key head still fill a tile.

The softmax is computed block by block (online softmax, Milakov and Gimelshein 2018; FlashAttention, arXiv 2205.14135),
in float32 and to the base 2, of scores multiplied by log2(e).

A kernel of its own writes keys and values into a KV cache of int8: each token's head with a scale of its own. The
arithmetic is that of the CPU's kernel (cpu.py), to the bit. Imported only where there is Triton.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.engine.attention.paged import KvCache, LayerCall
from worker.engine.device import KernelCall, upload
from worker.engine.scheduling.sequence import Batch, Row

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Minimum number of rows and columns of a product on tensor cores.
_LEAST_TILE = 16


def tile_size(size: int) -> int:
    """Return the smallest tile, a power of two, that holds `size` rows or columns."""
    return max(_LEAST_TILE, 1 << (size - 1).bit_length())


def position_tile(query: Tensor, value: Tensor) -> int:
    """Return the positions of one tile, so that keys and values of two tiles fit in shared memory."""
    widest = tile_size(max(query.shape[-1], value.shape[-1]))
    return max(_LEAST_TILE, min(64, 16384 // (widest * query.dtype.itemsize)))


@triton.jit
def attend_range(  # type: ignore[no-untyped-def]
    state, q, q_positions, keys, values, key_scales, value_scales, table, kv_head, first, stop,
    key_stride, key_head_stride, value_stride, value_head_stride, scale_stride, scaling,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Update `state` with the positions [first, stop) of the sequence with block table `table`.

    state is (sums [queries, value dim], total [queries], top [queries]): the sums of 2^(score - top) * value and of
    2^(score - top), and the largest score, so far. q [queries, dim] is zero beyond DIM; keys and values point at slot
    0, and of int8 the scales do, which else are None; q_positions [queries] is the last position that each query
    attends to.
    """
    sums, total, top = state
    keys += kv_head.to(tl.int64) * key_head_stride
    values += kv_head.to(tl.int64) * value_head_stride
    if key_scales is not None:
        key_scales += kv_head
        value_scales += kv_head
    dims = tl.arange(0, q.shape[1])
    value_dims = tl.arange(0, sums.shape[1])
    for begin in range(first, stop, POSITIONS):
        positions = begin + tl.arange(0, POSITIONS)
        inside = positions < stop
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        # Masked elements are zero: what another sequence left in a block, NaN included, does not count.
        k = tl.load(
            keys + slots[None, :] * key_stride + dims[:, None], mask=inside[None, :] & (dims < DIM)[:, None], other=0.0
        )
        factors = scaling
        if key_scales is not None:
            factors = scaling * tl.load(key_scales + slots * scale_stride, mask=inside, other=0.0)[None, :]
        visible = inside[None, :] & (positions[None, :] <= q_positions[:, None])
        if WINDOW is not None:
            visible = visible & (positions[None, :] > q_positions[:, None] - WINDOW)
        # "ieee": without rounding float32 to TF32. Scores are to the base 2.
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * factors
        if SOFTCAP is not None:
            # softcap * tanh(x / softcap)
            scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFTCAP)) - 1.0)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # Where a query has no position yet, -inf - -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        v = tl.load(
            values + slots[:, None] * value_stride + value_dims[None, :],
            mask=inside[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        if value_scales is not None:
            scales = tl.load(value_scales + slots * scale_stride, mask=inside, other=0.0)
            v = (v.to(tl.float32) * scales[:, None]).to(q.dtype)
        sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        top = new_top
    return sums, total, top


# Minimum number of positions of a split, and maximum number of splits of a row.
SPLIT_POSITIONS = 128
MAX_SPLITS = 32
# Target number of programs of a launch, enough to fill an H100: with fewer rows and key heads, more of a row's splits
# run in parallel.
_PROGRAMS = 1024


@triton.jit
def _split_length(positions, SPLIT: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.cdiv(tl.cdiv(positions, SPLIT), SPLITS) * SPLIT


# The stride of block tables is that of the longest row: specialized by it, a step would compile while requests wait.
@triton.jit(do_not_specialize=["table_stride"])
def attend_splits(  # type: ignore[no-untyped-def]
    split_sums, split_totals, split_tops, query, keys, values, key_scales, value_scales, tables, last_positions,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    scale_stride, table_stride, scaling,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr, POSITIONS: tl.constexpr, SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute a row's splits for the GROUP query heads of one key head. Grid: row, key head, split."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    last = tl.load(last_positions + row).to(tl.int32)
    first = 0
    if WINDOW is not None:
        first = tl.maximum(last + 1 - WINDOW, 0)
    length = _split_length(last + 1 - first, SPLIT, SPLITS)
    splits = tl.cdiv(last + 1 - first, length)
    members = tl.arange(0, GROUP_TILE)
    heads = kv_head * GROUP + members
    dims = tl.arange(0, DIM_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    q = tl.load(
        query + row.to(tl.int64) * query_stride + heads[:, None] * query_head_stride + dims[None, :],
        mask=(members < GROUP)[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    last_seen = tl.zeros([GROUP_TILE], tl.int32) + last
    for split in range(tl.program_id(2), splits, tl.num_programs(2)):
        begin = first + split * length
        state = (
            tl.zeros([GROUP_TILE, VALUE_TILE], tl.float32),
            tl.zeros([GROUP_TILE], tl.float32),
            tl.full([GROUP_TILE], float("-inf"), tl.float32),
        )
        sums, total, top = attend_range(
            state, q, last_seen, keys, values, key_scales, value_scales,
            tables + row.to(tl.int64) * table_stride, kv_head, begin, tl.minimum(begin + length, last + 1),
            key_stride, key_head_stride, value_stride, value_head_stride, scale_stride, scaling,
            WINDOW, SOFTCAP, BLOCK_SIZE, DIM, VALUE_DIM, POSITIONS,
        )  # fmt: skip
        places = (row.to(tl.int64) * HEADS + heads) * SPLITS + split
        tl.store(split_totals + places, total, mask=members < GROUP)
        tl.store(split_tops + places, top, mask=members < GROUP)
        inside = (members < GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :]
        tl.store(split_sums + places[:, None] * VALUE_DIM + value_dims[None, :], sums, mask=inside)


@triton.jit
def combine_splits(  # type: ignore[no-untyped-def]
    out, split_sums, split_totals, split_tops, last_positions, sinks,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one row and head, in their order. Grid: row, head."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    positions = tl.load(last_positions + row).to(tl.int32) + 1
    if WINDOW is not None:
        positions = tl.minimum(positions, WINDOW)
    splits = tl.cdiv(positions, _split_length(positions, SPLIT, SPLITS))
    index = tl.arange(0, SPLITS)
    value_dims = tl.arange(0, VALUE_TILE)
    place = row.to(tl.int64) * HEADS + head
    places = place * SPLITS + index
    tops = tl.load(split_tops + places, mask=index < splits, other=float("-inf"))
    totals = tl.load(split_totals + places, mask=index < splits, other=0.0)
    inside = (index < splits)[:, None] & (value_dims < VALUE_DIM)[None, :]
    sums = tl.load(split_sums + places[:, None] * VALUE_DIM + value_dims[None, :], mask=inside, other=0.0)
    top = tl.max(tops, 0)
    rest = 0.0
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
        rest = tl.exp2(sink - top)
    weights = tl.exp2(tops - top)
    attended = tl.sum(sums * weights[:, None], 0) / (tl.sum(totals * weights, 0) + rest)
    tl.store(out + place * VALUE_DIM + value_dims, attended.to(out.dtype.element_ty), mask=value_dims < VALUE_DIM)


def _arguments(call: LayerCall, cache: KvCache, query: Tensor, tables: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments and constants that both kernels take of the queries, the cache and the block tables."""
    keys, values = cache.slots[call.layer]
    key_scales, value_scales = cache.scales[call.layer] if cache.scales else (None, None)
    dim, value_dim = query.shape[-1], values.shape[-1]
    arguments = {
        "query": query, "keys": keys, "values": values, "key_scales": key_scales, "value_scales": value_scales,
        "tables": tables, "query_stride": query.stride(0), "query_head_stride": query.stride(1),
        "key_stride": keys.stride(0), "key_head_stride": keys.stride(1),
        "value_stride": values.stride(0), "value_head_stride": values.stride(1),
        "scale_stride": keys.shape[1], "table_stride": tables.stride(0), "scaling": call.scaling,
    }  # fmt: skip
    constants = {
        "WINDOW": call.window, "SOFTCAP": call.softcap, "BLOCK_SIZE": cache.block_size,
        "GROUP": query.shape[1] // keys.shape[1], "DIM": dim, "DIM_TILE": tile_size(dim), "VALUE_DIM": value_dim,
        "VALUE_TILE": tile_size(value_dim), "POSITIONS": position_tile(query, values),
    }  # fmt: skip
    return arguments, constants


def decode_calls(
    call: LayerCall, cache: KvCache, tables: Tensor, last_positions: Tensor, out: Tensor
) -> tuple[KernelCall, KernelCall]:
    """Return the two launches that compute the first rows of out [tokens, heads, value dim], contiguous.

    The rows' queries are the call's first; tables [rows, blocks] int32, last_positions [rows] int64, from 0. The last
    dimension of all tensors is contiguous.
    """
    query = call.query[: last_positions.shape[0]]
    arguments, constants = _arguments(call, cache, query, tables)
    (rows, heads, _), (_, kv_heads, value_dim) = query.shape, cache.slots[call.layer][1].shape
    most_splits = min(MAX_SPLITS, -(-tables.shape[1] * cache.block_size // SPLIT_POSITIONS))
    partial = torch.empty(rows, heads, MAX_SPLITS, value_dim + 2, dtype=torch.float32, device=query.device)
    numbers = rows * heads * MAX_SPLITS
    flat = partial.view(-1)
    parts = flat[: numbers * value_dim], flat[-2 * numbers : -numbers], flat[-numbers:]
    partial_sums = dict(zip(("split_sums", "split_totals", "split_tops"), parts, strict=True))
    splits = {"HEADS": heads, "SPLIT": SPLIT_POSITIONS, "SPLITS": MAX_SPLITS}
    attend = KernelCall(
        attend_splits,
        (rows, kv_heads, max(1, min(most_splits, _PROGRAMS // (rows * kv_heads)))),
        arguments | partial_sums | {"last_positions": last_positions},
        constants | splits | {"GROUP_TILE": tile_size(heads // kv_heads)},
        warps=4,
        stages=2,
    )
    combine = KernelCall(
        combine_splits,
        (rows, heads),
        partial_sums | {"out": out, "last_positions": last_positions, "sinks": call.sinks},
        splits | {name: constants[name] for name in ("WINDOW", "VALUE_DIM", "VALUE_TILE")},
        warps=4,
        stages=1,
    )
    return attend, combine


# Minimum number of lanes (tokens times query heads per key head) of a tile.
_LANES = 64


@triton.jit(do_not_specialize=["table_stride"])
def attend_chunks(  # type: ignore[no-untyped-def]
    out, query, keys, values, key_scales, value_scales, tables, tiles, sinks,
    out_stride, query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    scale_stride, table_stride, scaling,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Compute a tile's attention for the GROUP query heads of one key head. Grid: tile, key head."""
    tile = tiles + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    table = tables + tl.load(tile).to(tl.int64) * table_stride
    first_token = tl.load(tile + 1).to(tl.int64)
    first_position = tl.load(tile + 2)
    count = tl.load(tile + 3)
    lanes = tl.arange(0, LANES)
    token = lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    live = token < count
    dims = tl.arange(0, DIM_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    q = tl.load(
        query + (first_token + token)[:, None] * query_stride + heads[:, None] * query_head_stride + dims[None, :],
        mask=live[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    first = 0
    if WINDOW is not None:
        # From a multiple of POSITIONS, so that a token's bits do not depend on where its chunk begins.
        first = tl.maximum(first_position + 1 - WINDOW, 0) // POSITIONS * POSITIONS
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    if sinks is not None:
        # A sink counts as a first position whose value is zero.
        top = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * LOG2_E
        total = total + 1.0
    state = (tl.zeros([LANES, VALUE_TILE], tl.float32), total, top)
    sums, total, top = attend_range(
        state, q, first_position + token, keys, values, key_scales, value_scales,
        table, kv_head, first, first_position + count,
        key_stride, key_head_stride, value_stride, value_head_stride, scale_stride, scaling,
        WINDOW, SOFTCAP, BLOCK_SIZE, DIM, VALUE_DIM, POSITIONS,
    )  # fmt: skip
    attended = sums / tl.where(live, total, 1.0)[:, None]
    tl.store(
        out + (first_token + token)[:, None] * out_stride + heads[:, None] * VALUE_DIM + value_dims[None, :],
        attended.to(out.dtype.element_ty),
        mask=live[:, None] & (value_dims < VALUE_DIM)[None, :],
    )


def prefill_tiles(chunks: Sequence[tuple[int, int, int]], group: int) -> list[tuple[int, int, int, int]]:
    """Cut chunks (first token of the flat batch, its position, count) into tiles for `group` heads per key head.

    A tile is (chunk, first token, its position, count).
    """
    most = _lanes(group) // group
    return [
        (index, first + offset, start + offset, min(most, count - offset))
        for index, (first, start, count) in enumerate(chunks)
        for offset in range(0, count, most)
    ]


def _lanes(group: int) -> int:
    return max(_LANES, tile_size(group))


def prefill_call(call: LayerCall, cache: KvCache, tables: Tensor, tiles: Tensor, out: Tensor) -> KernelCall:
    """Return the launch that fills out [tokens, heads, value dim] (contiguous) at the tokens of `tiles` [n, 4] int32.

    tables [chunks, blocks] int32. Of every tensor the last dimension is contiguous.
    """
    arguments, constants = _arguments(call, cache, call.query, tables)
    return KernelCall(
        attend_chunks,
        (tiles.shape[0], cache.slots[call.layer][0].shape[1]),
        arguments | {"out": out, "tiles": tiles, "sinks": call.sinks, "out_stride": out.stride(0)},
        constants | {"LANES": _lanes(constants["GROUP"])},
        warps=4,
        stages=2,
    )


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
    # The spans cut into tiles, by the number of query heads per key head; made by the first layer that needs them.
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
            kernels += decode_calls(call, cache, self.decodes.tables, self.decodes.positions, out)
        if self.chunks is not None:
            tiles, group = self.chunks.tiles, call.query.shape[1] // call.key.shape[1]
            if group not in tiles:
                tiles[group] = upload(prefill_tiles(self.chunks.spans, group), call.query.device, torch.int32)
            kernels.append(prefill_call(call, cache, self.chunks.tables, tiles[group], out))
        return kernels


def triton_plan(batch: Batch, cache: KvCache, device: torch.device) -> TritonPlan:
    """Lay out the attention of a batch."""
    rows, longer = batch.rows[: batch.decodes], batch.rows[batch.decodes :]
    decodes = chunks = None
    if rows:
        positions = upload([row.start for row in rows], device)
        decodes = DecodeRows(_tables(rows, cache, device), positions)
    if longer:
        spans, first = [], len(rows)
        for row in longer:
            spans.append((first, row.start, row.count))
            first += row.count
        chunks = ChunkRows(_tables(longer, cache, device), tuple(spans))
    return TritonPlan(decodes, chunks)


def _tables(rows: Sequence[Row], cache: KvCache, device: torch.device) -> Tensor:
    blocks = [-(-(row.start + row.count) // cache.block_size) for row in rows]
    tables = np.full((len(rows), max(blocks)), cache.scratch_block, dtype=np.int32)
    for line, row, count in zip(tables, rows, blocks, strict=True):
        line[:count] = row.sequence.block_table[:count]
    return upload(tables, device)
