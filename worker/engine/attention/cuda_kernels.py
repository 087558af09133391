"""Triton kernels of attention over blocks: one query per sequence, and chunks of several sequences.

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
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.engine.attention.paged import KvCache, LayerCall
from worker.engine.device import KernelCall

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Minimum number of rows and columns of a product on tensor cores.
_LEAST_TILE = 16


def tile_size(size: int) -> int:
    """Return the smallest tile, a power of two, that holds `size` rows or columns."""
    return max(_LEAST_TILE, 1 << (size - 1).bit_length())


def position_tile(query: Tensor, value: Tensor) -> int:
    """Return the positions of one tile, so that keys and values of two tiles fit in shared memory."""
    widest = max(tile_size(query.shape[-1]), tile_size(value.shape[-1]))
    fitting = 16384 // (widest * query.dtype.itemsize)
    return max(_LEAST_TILE, min(64, fitting))


@triton.jit
def scaled_scores(q, k, scaling, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute scores [queries, positions], to the base 2, of q [queries, dim] and k [dim, positions].

    `scaling` is a number, or one for each position [1, positions].
    """
    # "ieee": without rounding float32 to TF32.
    scores = tl.dot(q, k, input_precision="ieee") * scaling
    if SOFTCAP is not None:
        # softcap * tanh(x / softcap)
        scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFTCAP)) - 1.0)
    return scores * LOG2_E


@triton.jit
def attend_range(  # type: ignore[no-untyped-def]
    state,
    q,
    q_positions,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    first,
    stop,
    key_stride,
    value_stride,
    scale_stride,
    scaling,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Update `state` with the positions [first, stop) of the sequence with block table `table`.

    state is (sums [queries, value dim], total [queries], top [queries]): the sums of 2^(score - top) * value and of
    2^(score - top), and the largest score, so far. q [queries, dim] is zero beyond DIM; keys and values point at the
    head's slot 0, and of int8 the scales do, which else are None; q_positions [queries] is the last position that each
    query attends to.
    """
    sums, total, top = state
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
        scores = tl.where(visible, scaled_scores(q, k.to(q.dtype), factors, SOFTCAP), float("-inf"))
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


@triton.jit
def attend_splits(  # type: ignore[no-untyped-def]
    sums_out,
    total_out,
    top_out,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    last_positions,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    scale_stride,
    table_stride,
    scaling,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    POSITIONS: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
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
    if key_scales is not None:
        key_scales += kv_head
        value_scales += kv_head
    last_seen = tl.zeros([GROUP_TILE], tl.int32) + last
    for split in range(tl.program_id(2), splits, tl.num_programs(2)):
        begin = first + split * length
        state = (
            tl.zeros([GROUP_TILE, VALUE_TILE], tl.float32),
            tl.zeros([GROUP_TILE], tl.float32),
            tl.full([GROUP_TILE], float("-inf"), tl.float32),
        )
        sums, total, top = attend_range(
            state, q, last_seen,
            keys + kv_head.to(tl.int64) * key_head_stride, values + kv_head.to(tl.int64) * value_head_stride,
            key_scales, value_scales,
            tables + row.to(tl.int64) * table_stride, begin, tl.minimum(begin + length, last + 1),
            key_stride, value_stride, scale_stride, scaling, WINDOW, SOFTCAP, BLOCK_SIZE, DIM, VALUE_DIM, POSITIONS,
        )  # fmt: skip
        places = (row.to(tl.int64) * HEADS + heads) * SPLITS + split
        tl.store(total_out + places, total, mask=members < GROUP)
        tl.store(top_out + places, top, mask=members < GROUP)
        tl.store(
            sums_out + places[:, None] * VALUE_DIM + value_dims[None, :],
            sums,
            mask=(members < GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :],
        )


@triton.jit
def combine_splits(  # type: ignore[no-untyped-def]
    out,
    sums_in,
    total_in,
    top_in,
    last_positions,
    sinks,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
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
    tops = tl.load(top_in + places, mask=index < splits, other=float("-inf"))
    totals = tl.load(total_in + places, mask=index < splits, other=0.0)
    sums = tl.load(
        sums_in + places[:, None] * VALUE_DIM + value_dims[None, :],
        mask=(index < splits)[:, None] & (value_dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    top = tl.max(tops, 0)
    rest = 0.0
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
        rest = tl.exp2(sink - top)
    weights = tl.exp2(tops - top)
    attended = tl.sum(sums * weights[:, None], 0) / (tl.sum(totals * weights, 0) + rest)
    tl.store(out + place * VALUE_DIM + value_dims, attended.to(out.dtype.element_ty), mask=value_dims < VALUE_DIM)


def decode_calls(
    call: LayerCall, cache: KvCache, tables: Tensor, last_positions: Tensor, out: Tensor
) -> tuple[KernelCall, KernelCall]:
    """Return the two launches that compute the first rows of out [tokens, heads, value dim], contiguous.

    The rows' queries are the call's first; tables [rows, blocks] int32, last_positions [rows] int64, from 0. The last
    dimension of all tensors is contiguous.
    """
    query = call.query[: last_positions.shape[0]]
    keys, values = cache.slots[call.layer]
    key_scales, value_scales = cache.scales[call.layer] if cache.scales else (None, None)
    rows, heads, dim = query.shape
    kv_heads, value_dim = values.shape[1:]
    most_splits = min(MAX_SPLITS, -(-tables.shape[1] * cache.block_size // SPLIT_POSITIONS))
    partial = torch.empty(rows, heads, MAX_SPLITS, value_dim + 2, dtype=torch.float32, device=query.device)
    numbers = rows * heads * MAX_SPLITS
    flat = partial.view(-1)
    sums, total, top = flat[: numbers * value_dim], flat[-2 * numbers : -numbers], flat[-numbers:]
    shared = {
        "WINDOW": call.window, "HEADS": heads, "VALUE_DIM": value_dim, "VALUE_TILE": tile_size(value_dim),
        "SPLIT": SPLIT_POSITIONS, "SPLITS": MAX_SPLITS,
    }  # fmt: skip
    attend = KernelCall(
        attend_splits,
        (rows, kv_heads, max(1, min(most_splits, _PROGRAMS // (rows * kv_heads)))),
        {
            "sums_out": sums, "total_out": total, "top_out": top,
            "query": query, "keys": keys, "values": values, "key_scales": key_scales, "value_scales": value_scales,
            "tables": tables, "last_positions": last_positions,
            "query_stride": query.stride(0), "query_head_stride": query.stride(1),
            "key_stride": keys.stride(0), "key_head_stride": keys.stride(1),
            "value_stride": values.stride(0), "value_head_stride": values.stride(1),
            "scale_stride": kv_heads, "table_stride": tables.stride(0), "scaling": call.scaling,
        },
        shared
        | {
            "SOFTCAP": call.softcap, "BLOCK_SIZE": cache.block_size, "GROUP": heads // kv_heads,
            "GROUP_TILE": tile_size(heads // kv_heads), "DIM": dim, "DIM_TILE": tile_size(dim),
            "POSITIONS": position_tile(query, values),
        },
        warps=4,
        stages=2,
    )  # fmt: skip
    combine = KernelCall(
        combine_splits,
        (rows, heads),
        {
            "out": out, "sums_in": sums, "total_in": total, "top_in": top,
            "last_positions": last_positions, "sinks": call.sinks,
        },
        shared,
        warps=4,
        stages=1,
    )  # fmt: skip
    return attend, combine


# Minimum number of lanes (tokens times query heads per key head) of a tile.
_LANES = 64


@triton.jit
def attend_chunks(  # type: ignore[no-untyped-def]
    out,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    tiles,
    sinks,
    out_stride,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    scale_stride,
    table_stride,
    scaling,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    POSITIONS: tl.constexpr,
):
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
    if key_scales is not None:
        key_scales += kv_head
        value_scales += kv_head
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    if sinks is not None:
        # A sink counts as a first position whose value is zero.
        top = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * LOG2_E
        total = total + 1.0
    state = (tl.zeros([LANES, VALUE_TILE], tl.float32), total, top)
    sums, total, top = attend_range(
        state, q, first_position + token,
        keys + kv_head.to(tl.int64) * key_head_stride, values + kv_head.to(tl.int64) * value_head_stride,
        key_scales, value_scales, table, first, first_position + count,
        key_stride, value_stride, scale_stride, scaling, WINDOW, SOFTCAP, BLOCK_SIZE, DIM, VALUE_DIM, POSITIONS,
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
    most = tokens_per_tile(group)
    return [
        (index, first + offset, start + offset, min(most, count - offset))
        for index, (first, start, count) in enumerate(chunks)
        for offset in range(0, count, most)
    ]


def tokens_per_tile(group: int) -> int:
    """Return the number of a chunk's tokens in a tile."""
    return max(_LANES, tile_size(group)) // group


def prefill_call(call: LayerCall, cache: KvCache, tables: Tensor, tiles: Tensor, out: Tensor) -> KernelCall:
    """Return the launch that fills out [tokens, heads, value dim] (contiguous) at the tokens of `tiles` [n, 4] int32.

    tables [chunks, blocks] int32. Of every tensor the last dimension is contiguous.
    """
    query = call.query
    keys, values = cache.slots[call.layer]
    key_scales, value_scales = cache.scales[call.layer] if cache.scales else (None, None)
    heads, dim = query.shape[1:]
    kv_heads, value_dim = values.shape[1:]
    group = heads // kv_heads
    return KernelCall(
        attend_chunks,
        (tiles.shape[0], kv_heads),
        {
            "out": out, "query": query, "keys": keys, "values": values,
            "key_scales": key_scales, "value_scales": value_scales, "tables": tables, "tiles": tiles,
            "sinks": call.sinks, "out_stride": out.stride(0),
            "query_stride": query.stride(0), "query_head_stride": query.stride(1),
            "key_stride": keys.stride(0), "key_head_stride": keys.stride(1),
            "value_stride": values.stride(0), "value_head_stride": values.stride(1),
            "scale_stride": kv_heads, "table_stride": tables.stride(0), "scaling": call.scaling,
        },
        {
            "WINDOW": call.window, "SOFTCAP": call.softcap, "BLOCK_SIZE": cache.block_size, "GROUP": group,
            "LANES": max(_LANES, tile_size(group)), "DIM": dim, "DIM_TILE": tile_size(dim), "VALUE_DIM": value_dim,
            "VALUE_TILE": tile_size(value_dim), "POSITIONS": position_tile(query, values),
        },
        warps=4,
        stages=2,
    )  # fmt: skip
