"""The expand of LoRA (Punica, arXiv 2310.18547): y[row] += shrunk[row] B of the row's adapter.

    columns    │ q_proj: block 0 │ 1 │ ... │ k_proj: 0 │ ...     one program: a tile of rows of one slot, a block

y [rows, width of all modules] is the base layers' output; where the adapter is a DoRA it is rescaled first. Rows in no
tile, and modules that their adapter does not change, keep their bits.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.engine.device.kernel_call import KernelCall
from worker.engine.lora.cuda.kernels.groups import LOW_TILE, MAX_MODULES, SlotGroup, Tiles
from worker.engine.lora.cuda.kernels.shrink import tile_rows

# Columns of a block, for low and for high tiles: as many as float32 sums of a tile fit in registers.
_LOW_COLUMNS, _HIGH_COLUMNS = 256, 128
# Ranks of one product: the smallest tile of a tensor core.
_RANKS = 16


@triton.jit(do_not_specialize=["rows"])
def expand_rows(  # type: ignore[no-untyped-def]
    y,
    sums,
    b,
    gains,
    shifts,
    tiles,
    ranks,
    rows,
    y_stride,
    slot_stride,
    width_0,
    width_1,
    width_2,
    MODULES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_SPACE: tl.constexpr,
    SPLITS: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Add one block of columns to a tile's rows. Grid: tile, block, module."""
    tile = tiles + tl.program_id(0) * 3
    slot = tl.load(tile).to(tl.int64)
    if slot < 0:
        return
    module = tl.program_id(2)
    width = tl.where(module == 0, width_0, tl.where(module == 1, width_1, width_2))
    first_column = tl.program_id(1) * COLUMNS
    if first_column >= width:
        return
    signed_rank = tl.load(ranks + slot * MODULES + module)
    rank = tl.abs(signed_rank)
    if rank == 0:
        return
    row_index, live = tile_rows(tile, HEIGHT)
    in_module = first_column + tl.arange(0, COLUMNS)
    inside = in_module < width
    first_of_module = tl.where(module > 0, width_0, 0) + tl.where(module > 1, width_1, 0)
    weights = b + slot * slot_stride + first_of_module.to(tl.int64) * MAX_RANK + in_module[None, :]
    outputs = y + row_index[:, None] * y_stride + (first_of_module + in_module)[None, :]
    mask = live[:, None] & inside[None, :]
    # Loaded before the product, so that the load overlaps with it.
    base = tl.load(outputs, mask=mask, other=0.0)
    delta = tl.zeros([HEIGHT, COLUMNS], tl.float32)
    for first_rank in range(0, rank, RANKS):
        rank_index = first_rank + tl.arange(0, RANKS)
        shrunk = tl.zeros([HEIGHT, RANKS], tl.float32)
        for split in tl.static_range(SPLITS):
            places = (split * rows + row_index) * MODULES + module
            shrunk += tl.load(sums + places[:, None] * RANK_SPACE + rank_index[None, :], mask=live[:, None], other=0.0)
        part = tl.load(
            weights + rank_index[:, None] * width, mask=(rank_index < rank)[:, None] & inside[None, :], other=0.0
        )
        delta = tl.dot(shrunk.to(part.dtype), part, delta, input_precision="ieee")
    total = base.to(tl.float32)
    if signed_rank < 0:
        places = slot * (width_0 + width_1 + width_2) + (first_of_module + in_module)[None, :]
        gain = tl.load(gains + places, mask=inside[None, :], other=0.0)
        shift = tl.load(shifts + places, mask=inside[None, :], other=0.0)
        total += total * gain.to(tl.float32) + shift.to(tl.float32)
    tl.store(outputs, (total + delta).to(y.dtype.element_ty), mask=mask)


def expand_call(y: Tensor, sums: Tensor, group: SlotGroup, tiles: Tiles) -> KernelCall:
    """Return the launch that adds to y [rows, width of all modules], whose last dimension is contiguous.

    `sums` is the output of the shrink of the same tiles.
    """
    widths = group.widths + (0,) * (MAX_MODULES - len(group.widths))
    columns = _LOW_COLUMNS if tiles.height == LOW_TILE else _HIGH_COLUMNS
    return KernelCall(
        expand_rows,
        (len(tiles), -(-max(widths) // columns), len(group.widths)),
        {
            "y": y, "sums": sums, "b": group.b, "gains": group.rescales.gain,
            "shifts": group.rescales.shift, "tiles": tiles.table, "ranks": group.ranks, "rows": y.shape[0],
            "y_stride": y.stride(0), "slot_stride": group.b.stride(0),
            "width_0": widths[0], "width_1": widths[1], "width_2": widths[2],
        },
        {
            "MODULES": len(group.widths), "MAX_RANK": group.max_rank, "RANK_SPACE": group.rank_space,
            "SPLITS": group.splits, "HEIGHT": tiles.height, "COLUMNS": columns, "RANKS": _RANKS,
        },
        warps=4,
        stages=2,
    )  # fmt: skip
