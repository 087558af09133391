"""Triton kernels of attention over blocks, and their launches for decode rows and chunks.

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
The positions are attended to in splits too, cut at the same multiples for every token, and combined in their order: by
the program itself or, where a step has so few tiles that they would not fill the device, by a second launch. The
arithmetic is the same, so that a token's bits depend neither on its company nor on where its chunk begins.

The softmax is computed block by block (online softmax, Milakov and Gimelshein 2018; FlashAttention, arXiv 2205.14135),
in float32 and to the base 2, of scores multiplied by log2(e). Imported only where there is Triton.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex.worker.engine.attention.paged import KvCache, LayerCall
from loraplex.worker.engine.device import KernelCall

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


# Minimum number of lanes (tokens times query heads per key head) of a tile: each of two warp groups computes 64 of them
# over the same keys. Of wide values their sums would not be in registers.
_LANES, _LANES_OF_WIDE = 128, 64
# Positions of a split of chunks: a multiple of every position_tile.
CHUNK_SPLIT = 1024
# Dimensions of a program that combines splits.
_COMBINED = 32
# With so many programs a launch fills an H100 without splits. Splits in flight take 33 KB each, of 128 numbers a head.
_FULL, _MOST_PARTS = 128, 4096


@triton.jit
def _tile(tiles, positions):  # type: ignore[no-untyped-def]
    """Return this program's tile: the line of its table, its first token, that one's position, the number of tokens.

    Without tiles it is a token with its position.
    """
    row = tl.program_id(0)
    line, first_token, first_position, count = row.to(tl.int64), row.to(tl.int64), row * 0, row * 0 + 1
    if tiles is None:
        first_position = tl.load(positions + row).to(tl.int32)
    else:
        tile = tiles + row * 4
        line, first_token = tl.load(tile).to(tl.int64), tl.load(tile + 1).to(tl.int64)
        first_position, count = tl.load(tile + 2), tl.load(tile + 3)
    return line, first_token, first_position, count


@triton.jit
def _first_seen(first_position, WINDOW: tl.constexpr, POSITIONS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first position that a tile attends to."""
    first = 0
    if WINDOW is not None:
        # A multiple of POSITIONS, so that a token's bits do not depend on where its chunk begins.
        first = tl.maximum(first_position + 1 - WINDOW, 0) // POSITIONS * POSITIONS
    return first


@triton.jit
def _before(sinks, heads, live, LANES: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the state before any position: a sink counts as one whose value is zero."""
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * LOG2_E
        total = total + 1.0
    return tl.zeros([LANES, TILE], tl.float32), total, top


@triton.jit
def _merge(state, more):  # type: ignore[no-untyped-def]
    """Add a split's sums to those before. Both kernels round alike: the multiplications that are fused are named."""
    sums, total, top = state
    more_sums, more_total, more_top = more
    new_top = tl.maximum(top, more_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade, share = tl.exp2(top - base), tl.exp2(more_top - base)
    sums = tl.fma(sums, tl.broadcast_to(fade[:, None], sums.shape), more_sums * share[:, None])
    return sums, tl.fma(total, fade, more_total * share), new_top


@triton.jit(do_not_specialize=["table_stride"])
def attend_chunks(  # type: ignore[no-untyped-def]
    out, part_sums, part_totals, part_tops, query, keys, values, key_scales, value_scales, tables, tiles, positions,
    sinks, out_stride, query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    scale_stride, table_stride, scaling,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr, POSITIONS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute a tile's attention for the GROUP query heads of one key head, or its splits. Grid: tile, key head, split.

    part_sums [tiles, key heads, splits, LANES, VALUE_DIM], and totals and tops without VALUE_DIM, are the splits'; None
    where one program computes all of them, and the output.
    """
    line, first_token, first_position, count = _tile(tiles, positions)
    kv_head = tl.program_id(1)
    table = tables + line * table_stride
    lanes = tl.arange(0, LANES)
    token = lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    live = token < count
    dims = tl.arange(0, DIM_TILE)
    value_dims = tl.arange(0, VALUE_TILE)
    inside = value_dims < VALUE_DIM
    q = tl.load(
        query + (first_token + token)[:, None] * query_stride + heads[:, None] * query_head_stride + dims[None, :],
        mask=live[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    first = _first_seen(first_position, WINDOW, POSITIONS)
    stop = first_position + count
    sums, total, top = _before(sinks, heads, live, LANES, VALUE_TILE)
    for split in range(first // SPLIT + tl.program_id(2), tl.cdiv(stop, SPLIT), tl.num_programs(2)):
        nothing = _before(None, heads, live, LANES, VALUE_TILE)
        part, part_total, part_top = attend_range(
            nothing, q, first_position + token, keys, values, key_scales, value_scales,
            table, kv_head, tl.maximum(first, split * SPLIT), tl.minimum(stop, split * SPLIT + SPLIT),
            key_stride, key_head_stride, value_stride, value_head_stride, scale_stride, scaling,
            WINDOW, SOFTCAP, BLOCK_SIZE, DIM, VALUE_DIM, POSITIONS,
        )  # fmt: skip
        if part_sums is None:
            sums, total, top = _merge((sums, total, top), (part, part_total, part_top))
        else:
            number = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + kv_head) * tl.num_programs(2)
            places = (number + split - first // SPLIT) * LANES + lanes
            tl.store(part_totals + places, part_total)
            tl.store(part_tops + places, part_top)
            tl.store(part_sums + places[:, None] * VALUE_DIM + value_dims[None, :], part, mask=inside[None, :])
    if part_sums is None:
        attended = sums / tl.where(live, total, 1.0)[:, None]
        tl.store(
            out + (first_token + token)[:, None] * out_stride + heads[:, None] * VALUE_DIM + value_dims[None, :],
            attended.to(out.dtype.element_ty),
            mask=live[:, None] & inside[None, :],
        )


@triton.jit(do_not_specialize=["splits"])
def combine_chunks(  # type: ignore[no-untyped-def]
    out, part_sums, part_totals, part_tops, tiles, positions, sinks, out_stride, splits,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr,
    POSITIONS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Combine a tile's splits, in their order, for some dimensions. Grid: tile, key head, dimensions."""
    _, first_token, first_position, count = _tile(tiles, positions)
    kv_head = tl.program_id(1)
    lanes = tl.arange(0, LANES)
    token = lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    live = token < count
    dims = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = dims < VALUE_DIM
    number = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + kv_head) * splits
    sums, total, top = _before(sinks, heads, live, LANES, TILE)
    used = tl.cdiv(first_position + count, SPLIT) - _first_seen(first_position, WINDOW, POSITIONS) // SPLIT
    for split in range(0, used):
        places = (number + split) * LANES + lanes
        part = tl.load(part_sums + places[:, None] * VALUE_DIM + dims[None, :], mask=inside[None, :], other=0.0)
        more = (part, tl.load(part_totals + places), tl.load(part_tops + places))
        sums, total, top = _merge((sums, total, top), more)
    attended = sums / tl.where(live, total, 1.0)[:, None]
    tl.store(
        out + (first_token + token)[:, None] * out_stride + heads[:, None] * VALUE_DIM + dims[None, :],
        attended.to(out.dtype.element_ty),
        mask=live[:, None] & inside[None, :],
    )


def prefill_tiles(chunks: Sequence[tuple[int, int, int]], most: int) -> list[tuple[int, int, int, int]]:
    """Cut chunks (first token of the flat batch, its position, count) into tiles of at most `most` tokens.

    A tile is (chunk, first token, its position, count).
    """
    return [
        (index, first + offset, start + offset, min(most, count - offset))
        for index, (first, start, count) in enumerate(chunks)
        for offset in range(0, count, most)
    ]


def tile_tokens(group: int, value_dim: int) -> int:
    """Return the maximum tokens of a tile of chunks, for `group` heads per key head."""
    return _lanes(group, value_dim) // group


def _lanes(group: int, value_dim: int) -> int:
    return max(_LANES if tile_size(value_dim) <= _LANES else _LANES_OF_WIDE, tile_size(group))


def prefill_calls(
    call: LayerCall, cache: KvCache, tables: Tensor, tiles: Tensor, longest: int, out: Tensor
) -> list[KernelCall]:
    """Return the launches that fill out [tokens, heads, value dim] (contiguous) at the tokens of `tiles`.

    These are [n, 4] int32 (see prefill_tiles), or the positions [n] int64 of the first tokens, which then are chunks of
    one token each. tables [chunks, blocks] int32; `longest` is the highest number of positions that a token attends to.
    Of every tensor the last dimension is contiguous.
    """
    arguments, constants = _arguments(call, cache, call.query, tables)
    value_dim, kv_heads = constants["VALUE_DIM"], cache.slots[call.layer][0].shape[1]
    lanes = _lanes(constants["GROUP"], value_dim)
    if cache.scales:  # codes take registers of their own
        constants["POSITIONS"] = max(_LEAST_TILE, constants["POSITIONS"] // 2)
    splits, programs = -(-longest // CHUNK_SPLIT), len(tiles) * kv_heads
    if call.window is not None:
        # A tile's positions, from a multiple of POSITIONS on, begin and end within splits.
        seen = call.window + lanes + constants["POSITIONS"]
        splits = min(splits, -(-seen // CHUNK_SPLIT) + 1)
    parted = splits > 1 and programs < _FULL and programs * splits <= _MOST_PARTS
    parts: dict[str, Tensor | None] = dict.fromkeys(("part_sums", "part_totals", "part_tops"))
    if parted:
        numbers = programs * splits * lanes
        flat = torch.empty(numbers * (value_dim + 2), dtype=torch.float32, device=out.device)
        cut = flat[: numbers * value_dim], flat[-2 * numbers : -numbers], flat[-numbers:]
        parts = dict(zip(parts, cut, strict=True))
    which = {"tiles": None, "positions": tiles} if tiles.ndim == 1 else {"tiles": tiles, "positions": None}
    common = parts | which | {"out": out, "sinks": call.sinks, "out_stride": out.stride(0)}
    sizes = {"LANES": lanes, "SPLIT": CHUNK_SPLIT}
    # A program's sums, of a split and of those before it, are to be in registers.
    attend = KernelCall(
        attend_chunks,
        (len(tiles), kv_heads, splits if parted else 1),
        arguments | common,
        constants | sizes,
        warps=8,
        stages=2,
    )
    if not parted:
        return [attend]
    tile = min(_COMBINED, constants["VALUE_TILE"])
    combine = KernelCall(
        combine_chunks,
        (len(tiles), kv_heads, -(-value_dim // tile)),
        common | {"splits": splits},
        sizes | {"TILE": tile} | {name: constants[name] for name in ("WINDOW", "GROUP", "VALUE_DIM", "POSITIONS")},
        warps=4,
        stages=1,
    )
    return [attend, combine]
