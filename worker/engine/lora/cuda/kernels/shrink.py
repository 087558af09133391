"""The shrink of LoRA (Punica, arXiv 2310.18547): x[row] A^T of the row's adapter, as partial sums over the features.

x [rows, in_features]     sums [splits, rows, modules, rank_space], float32

    features   │ split 0 │ split 1 │ ...      one program: a tile of rows of one slot, some ranks of one module

The expand adds the partial sums in the order of the splits: without atomics, so the bits are the same in every run. A
is read once for each tile, and not beyond the adapter's rank; from there to the end of the last program's ranks the
sums are zeros, so that the expand can read them 16 bytes at a time.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.engine.device.kernel_call import KernelCall
from worker.engine.lora.cuda.kernels.groups import LOW_TILE, SlotGroup, Tiles

# Bytes of a row of x, or of a rank of A, that one product reads.
_FEATURE_BYTES = 256


@triton.jit
def tile_rows(tile, HEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row indices [HEIGHT] of a line of Tiles.table, and a mask of the rows that exist."""
    lanes = tl.arange(0, HEIGHT)
    return tl.load(tile + 1).to(tl.int64) + lanes, lanes < tl.load(tile + 2)


# Not specialized by the number of rows: each new number would compile a kernel while requests wait.
@triton.jit(do_not_specialize=["rows"])
def shrink_rows(  # type: ignore[no-untyped-def]
    sums_out,
    x,
    a,
    tiles,
    ranks,
    rows,
    in_features,
    x_stride,
    slot_stride,
    MODULES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_SPACE: tl.constexpr,
    HEIGHT: tl.constexpr,
    RANKS: tl.constexpr,
    FEATURES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Compute a tile's partial sums. Grid: tile, module and ranks, split."""
    tile = tiles + tl.program_id(0) * 3
    slot = tl.load(tile).to(tl.int64)
    if slot < 0:
        return
    rank_tiles: tl.constexpr = RANK_SPACE // RANKS
    module = tl.program_id(1) // rank_tiles
    first_rank = tl.program_id(1) % rank_tiles * RANKS
    rank = tl.abs(tl.load(ranks + slot * MODULES + module))
    if first_rank >= rank:
        return
    row_index, live = tile_rows(tile, HEIGHT)
    rank_index = first_rank + tl.arange(0, RANKS)
    used = rank_index < rank
    inputs = x + row_index[:, None] * x_stride
    weights = a + slot * slot_stride + (module * MAX_RANK + rank_index).to(tl.int64)[None, :] * in_features
    sums = tl.zeros([HEIGHT, RANKS], tl.float32)
    begin = tl.program_id(2) * SPLIT
    for at in range(begin, tl.minimum(begin + SPLIT, in_features), FEATURES):
        features = at + tl.arange(0, FEATURES)
        inside = features < in_features
        # Masked elements are zero: what an earlier adapter left beyond this rank, NaN included, does not count.
        rows_part = tl.load(inputs + features[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        part = tl.load(weights + features[:, None], mask=inside[:, None] & used[None, :], other=0.0)
        # "ieee": without rounding float32 to TF32.
        sums = tl.dot(rows_part, part, sums, input_precision="ieee")
    places = (tl.program_id(2).to(tl.int64) * rows + row_index) * MODULES + module
    tl.store(sums_out + places[:, None] * RANK_SPACE + rank_index[None, :], sums, mask=live[:, None])


def shrink_call(x: Tensor, group: SlotGroup, tiles: Tiles, sums: Tensor) -> KernelCall:
    """Return the launch that computes sums [splits, rows, modules, rank_space] float32, contiguous.

    x [rows, in_features] has a contiguous last dimension. For rows in no tile nothing is written.
    """
    modules = len(group.widths)
    return KernelCall(
        shrink_rows,
        (len(tiles), modules * group.rank_space // group.rank_tile, group.splits),
        {
            "sums_out": sums, "x": x, "a": group.a, "tiles": tiles.table, "ranks": group.ranks,
            "rows": x.shape[0], "in_features": group.in_features, "x_stride": x.stride(0),
            "slot_stride": group.a.stride(0),
        },
        {
            "MODULES": modules, "MAX_RANK": group.max_rank, "RANK_SPACE": group.rank_space, "HEIGHT": tiles.height,
            "RANKS": group.rank_tile, "FEATURES": _FEATURE_BYTES // x.dtype.itemsize, "SPLIT": group.split_features,
        },
        warps=4,
        stages=4 if tiles.height == LOW_TILE else 3,
    )  # fmt: skip
