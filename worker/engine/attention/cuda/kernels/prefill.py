"""Attention of chunks of several sequences, each over its blocks: earlier positions and its own, causal by position.

The chunks' tokens are consecutive in the flat batch, and their keys and values are in the cache already. A program
computes some tokens of one chunk for the query heads that share a key head:

    lanes of its tile    token 0: head 0 1 2 │ token 1: head 0 1 2 │ ...

so that keys are read once for all of them, and short chunks of models with many heads per key head still fill a tile.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from worker.engine.attention.cuda.kernels.tiles import LOG2_E, attend_range, position_tile, tile_size
from worker.engine.attention.kv_cache import KvCache
from worker.engine.attention.paged import LayerCall
from worker.engine.device.kernel_call import KernelCall

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
