"""Attention of one query per sequence over its blocks, in splits that are combined (flash-decoding, Dao et al. 2023).

    row of length 700    │ split 0 │ split 1 │ split 2 │ ...      each: sums, total, top of its positions
    row of length 90     │ split 0 │
                           └────────── combined in split order

A row's splits depend on its length alone, so that its bits do not depend on the batch. The grid depends on the shapes
alone, so that CUDA graphs can hold it: program i of n of a row takes the splits i, i + n, i + 2n, ..., or none.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.engine.attention.cuda.kernels.tiles import LOG2_E, attend_range, position_tile, tile_size
from worker.engine.attention.kv_cache import KvCache
from worker.engine.attention.paged import LayerCall
from worker.engine.device.kernel_call import KernelCall

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
