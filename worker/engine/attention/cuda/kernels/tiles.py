"""What the attention kernels share: one tile of queries over a range of a sequence's cached positions.

The softmax is computed as it goes (online softmax, Milakov and Gimelshein 2018; FlashAttention), in float32 and to the
base 2, of scores that are multiplied by log2(e).
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# A product on tensor cores has at least so many rows and columns.
_LEAST_TILE = 16


def tile_size(size: int) -> int:
    """The tile that holds `size` rows or columns: a power of two."""
    return max(_LEAST_TILE, 1 << (size - 1).bit_length())


def position_tile(query: Tensor, value: Tensor) -> int:
    """How many cached positions are looked at together, so that keys and values of two tiles fit in shared memory."""
    widest = max(tile_size(query.shape[-1]), tile_size(value.shape[-1]))
    fitting = 16384 // (widest * query.dtype.itemsize)
    return max(_LEAST_TILE, min(64, fitting))


@triton.jit
def scaled_scores(q, k, scaling, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores [queries, positions] to the base 2, of q [queries, dim] and k [dim, positions]."""
    # "ieee": float32 is not rounded to what tensor cores take.
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
    table,
    first,
    stop,
    key_stride,
    value_stride,
    scaling,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Go on from `state` over the positions [first, stop) of the sequence with block table `table`.

    state is (sums [queries, value dim], total [queries], top [queries]): sums and total of 2^(score - top) so far.
    q [queries, dim] is zero beyond DIM; keys and values point at the head's slot 0; q_positions [queries] is the last
    position each query sees.
    """
    sums, total, top = state
    dims = tl.arange(0, q.shape[1])
    value_dims = tl.arange(0, sums.shape[1])
    for begin in range(first, stop, POSITIONS):
        positions = begin + tl.arange(0, POSITIONS)
        inside = positions < stop
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        # What is not loaded is zero: nothing that another sequence left behind gets in, also no NaN.
        k = tl.load(
            keys + slots[None, :] * key_stride + dims[:, None], mask=inside[None, :] & (dims < DIM)[:, None], other=0.0
        )
        visible = inside[None, :] & (positions[None, :] <= q_positions[:, None])
        if WINDOW is not None:
            visible = visible & (positions[None, :] > q_positions[:, None] - WINDOW)
        scores = tl.where(visible, scaled_scores(q, k, scaling, SOFTCAP), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen nothing yet: -inf - -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        v = tl.load(
            values + slots[:, None] * value_stride + value_dims[None, :],
            mask=inside[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        top = new_top
    return sums, total, top
