"""The common part of the attention kernels: a tile of queries over a range of a sequence's cached positions.

The softmax is computed block by block (online softmax, Milakov and Gimelshein 2018; FlashAttention, arXiv 2205.14135),
in float32 and to the base 2, of scores multiplied by log2(e).
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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
