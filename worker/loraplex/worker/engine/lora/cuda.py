"""LoRA on CUDA: fused linears as one product, each row's adapter added from its slot by Triton kernels.

    x ──▶ q, k and v's weights, one product ──▶ y [rows, q | k | v] ──▶ CudaLora.apply(x, y) ──▶ views of y

    lora.begin_decode(slots, padded=8)        before a step of one token per row, captured or not
    lora.begin_step([(slot, tokens), ...])    before any other step
    lora.apply(x, y, "layers.0.qkv")          in the layers: y[row] += x[row] A^T B of the row's adapter,
                                              in two launches per group of modules (shrink, expand)

The host never waits for the device. After begin_decode all arguments of a launch are at fixed addresses and the grid
depends on `padded` alone, so that a CUDA graph can hold the launch: the table is overwritten before each replay.
Imported only where Triton is installed. The slots of a group of modules with the same input are at fixed addresses:

    a [slots, modules, max_rank, in_features]     b [slots, max_rank * width of each module]     ranks [slots, modules]
    rescales: gain and shift, [slots, sum of the widths] each, of DoRA pairs, whose rank is negative in `ranks`

A pair's A and B are contiguous, so that installing an adapter takes few launches, and reads are 16 bytes wide.

The shrink (Punica, arXiv 2310.18547) computes x[row] A^T of the row's adapter, as partial sums over the features:

    x [rows, in_features]     sums [splits, rows, modules, rank_space], float32
    features   │ split 0 │ split 1 │ ...      one program: a tile of rows of one slot, some ranks of one module

The expand adds the partial sums in the order of the splits: without atomics, so the bits are the same in every run. A
is read once for each tile, and not beyond the adapter's rank; from there to the end of the last program's ranks the
sums are zeros, so that the expand can read them 16 bytes at a time.

The expand computes y[row] += shrunk[row] B of the row's adapter:

    columns    │ q_proj: block 0 │ 1 │ ... │ k_proj: 0 │ ...     one program: a tile of rows of one slot, a block

y [rows, width of all modules] is the base layers' output; where the adapter is a DoRA it is rescaled first. Rows in no
tile, and modules that their adapter does not change, keep their bits.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - kernels take every size as an argument, and compile-time ones in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from loraplex.worker.engine.device import KernelCall, upload
from loraplex.worker.engine.lora.base_layers import FusedProduct, can_fuse, fuse, fusion_candidates, place_parts
from loraplex.worker.engine.lora.weights import AdapterWeights, LoraPair, Rescale
from loraplex.worker.engine.quantized.layers import AnyLinear, is_linear

# Maximum number of modules in a group, which the expand kernel has arguments for: q, k and v.
MAX_MODULES = 3
# Rows of a tile: 16 is the least for a product on tensor cores; with 64, long runs of one adapter read it less often.
LOW_TILE, HIGH_TILE = 16, 64
# Features that one program of the shrink sums up, and the maximum number of partial sums that the expand adds. Both
# depend on the module alone, so that a row's bits do not depend on the batch.
_SPLIT = 1024
_MOST_SPLITS = 16
# Ranks that a program of the shrink computes: the smallest tile with which max_rank takes at most _RANK_TILES tiles.
_LEAST_RANKS, _MOST_RANKS, _RANK_TILES = 16, 64, 8


class SlotGroup:
    """The slots of modules with the same input; their outputs are side by side in the order of `widths`."""

    def __init__(
        self,
        in_features: int,
        widths: Sequence[int],
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if not 1 <= len(widths) <= MAX_MODULES:
            raise ValueError(f"a group has 1 to {MAX_MODULES} modules, not {len(widths)}")
        self.in_features = in_features
        self.widths = tuple(widths)
        self.max_rank = max_rank
        # Not zeroed: nothing beyond a pair's own rank is read.
        self.a = torch.empty(slots, len(widths), max_rank, in_features, dtype=dtype, device=device)
        self.b = torch.empty(slots, max_rank * sum(widths), dtype=dtype, device=device)
        self.rescales = Rescale(*torch.empty(2, slots, sum(widths), dtype=dtype, device=device))
        self.ranks = torch.zeros(slots, len(widths), dtype=torch.int32, device=device)

    @property
    def splits(self) -> int:
        """Return the number of partial sums of a row's shrink."""
        return -(-self.in_features // self.split_features)

    @property
    def split_features(self) -> int:
        """Return the number of features of a partial sum."""
        return _SPLIT * max(1, -(-self.in_features // (_SPLIT * _MOST_SPLITS)))

    @property
    def rank_tile(self) -> int:
        """Return the ranks of a shrink program; programs beyond an adapter's rank do nothing, but cost a launch."""
        ranks = _LEAST_RANKS
        while ranks < _MOST_RANKS and ranks * _RANK_TILES < self.max_rank:
            ranks *= 2
        return ranks

    @property
    def rank_space(self) -> int:
        """Return the ranks allocated for a row's partial sums: max_rank rounded up to whole tiles."""
        return -(-self.max_rank // self.rank_tile) * self.rank_tile

    def place(self, slot: int, module: int, rank: int) -> LoraPair:
        """Return contiguous views of the slot where a module's pair of this rank is stored."""
        column, width = sum(self.widths[:module]), self.widths[module]
        first, columns = self.max_rank * column, slice(column, column + width)
        return LoraPair(
            self.a[slot, module, :rank],
            self.b[slot, first : first + rank * width].view(rank, width),
            Rescale(self.rescales.gain[slot, columns], self.rescales.shift[slot, columns]),
        )


@dataclass(frozen=True, slots=True)
class Tiles:
    """A step's rows cut into tiles of at most `height` rows of one slot: `table` [tiles, 3] int32.

    A line is (slot, first row, rows); slot -1 is a tile without rows. The kernels do not change rows in no tile.
    """

    table: Tensor
    height: int

    def __len__(self) -> int:
        return len(self.table)


def tile_lines(rows: Sequence[tuple[int, int]], height: int) -> list[tuple[int, int, int]]:
    """Cut consecutive rows, given as (slot or -1, tokens), into the lines of a Tiles.

    Consecutive entries with the same slot share tiles.
    """
    lines: list[tuple[int, int, int]] = []
    first = 0
    for slot, tokens in rows:
        if slot >= 0:
            at, stop = first, first + tokens
            if lines and lines[-1][0] == slot and sum(lines[-1][1:]) == first:
                _, at, _ = lines.pop()
            lines += [(slot, begin, min(height, stop - begin)) for begin in range(at, stop, height)]
        first += tokens
    return lines


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
    sums_out, x, a, tiles, ranks, rows, in_features, x_stride, slot_stride,
    MODULES: tl.constexpr, MAX_RANK: tl.constexpr, RANK_SPACE: tl.constexpr,
    HEIGHT: tl.constexpr, RANKS: tl.constexpr, FEATURES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
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


# Columns of a block, for low and for high tiles: as many as float32 sums of a tile fit in registers.
_LOW_COLUMNS, _HIGH_COLUMNS = 256, 128
# Ranks of one product: the smallest tile of a tensor core.
_RANKS = 16


@triton.jit(do_not_specialize=["rows"])
def expand_rows(  # type: ignore[no-untyped-def]
    y, sums, b, gains, shifts, tiles, ranks, rows, y_stride, slot_stride, width_0, width_1, width_2,
    MODULES: tl.constexpr, MAX_RANK: tl.constexpr, RANK_SPACE: tl.constexpr,
    SPLITS: tl.constexpr, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
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


_NO_TILE = (-1, 0, 0)


class CudaLora:
    """Implements AdapterLayers of weights: slots of modules in groups with the same input."""

    def __init__(
        self,
        linears: Mapping[str, tuple[int, int]],
        groups: Mapping[str, Sequence[str]],
        slots: int,
        max_rank: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate all slots: slots * max_rank * (in_features + out_features) elements for each module, and a few more.

        `groups` are the modules of each group by the group's name, in the order of their columns in its output.

        `linears` are (in_features, out_features) by module name; `rows` is the largest `padded`.
        """
        self._device = device
        self._modules = dict(groups)
        self._groups: dict[str, SlotGroup] = {}
        for name, modules in groups.items():
            inputs = {linears[module][0] for module in modules}
            if len(inputs) != 1:
                raise ValueError(f"the modules of group {name} take {sorted(inputs)} features, not the same")
            widths = [linears[module][1] for module in modules]
            self._groups[name] = SlotGroup(inputs.pop(), widths, slots, max_rank, dtype, device)
        self._table = torch.full((rows, 3), -1, dtype=torch.int32, device=device)
        self._tiles = Tiles(self._table[:0], LOW_TILE)
        self._highest = HIGH_TILE

    def keep_low_tiles(self) -> None:
        """Use tiles of one height from now on, so that a row's bits do not depend on how many tokens others have."""
        self._highest = LOW_TILE

    def warm_up(self) -> None:
        """Compile all kernels before the first step; nothing is computed."""
        for height in (LOW_TILE, HIGH_TILE):
            self._tiles = Tiles(upload([_NO_TILE], self._device, torch.int32), height)
            for name, group in self._groups.items():
                self.apply(group.a.new_zeros(1, group.in_features), group.b.new_zeros(1, sum(group.widths)), name)
        self.begin_step([])

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """See AdapterLayers; the copies are queued behind all launches that are in the stream already."""
        places: list[Tensor] = []
        tensors: list[Tensor] = []
        ranks: list[int] = []
        for name, group in self._groups.items():
            for index, module in enumerate(self._modules[name]):
                pair = weights.pairs.get(module)
                rank = 0 if pair is None else pair.rank
                ranks.append(rank if pair is None or pair.rescale is None else -rank)
                if pair is not None:
                    tensors += pair.tensors
                    places += group.place(slot, index, rank).tensors[: len(pair.tensors)]
        # A few launches for all tensors: one for each would keep the host from the next step for milliseconds.
        if places:
            torch._foreach_copy_(places, tensors, non_blocking=True)
        groups = list(self._groups.values())
        parts = torch.split(upload(ranks, self._device, torch.int32), [len(group.widths) for group in groups])
        torch._foreach_copy_([group.ranks[slot] for group in groups], list(parts))

    def begin_decode(self, row_slots: Sequence[int], padded: int) -> None:
        """See AdapterLayers."""
        lines = tile_lines([(slot, 1) for slot in row_slots], LOW_TILE)
        # At most one tile per row, so `padded` tiles are enough.
        lines += [_NO_TILE] * (padded - len(lines))
        self._table[:padded].copy_(upload(lines, self._device, torch.int32))
        self._tiles = Tiles(self._table[:padded], LOW_TILE)

    def begin_step(self, rows: Sequence[tuple[int, int]], logit_counts: Sequence[int] = ()) -> None:
        """See AdapterLayers. The host's work is O(rows + tiles); where no row has an adapter nothing is launched."""
        height = self._highest if any(slot >= 0 and tokens > LOW_TILE for slot, tokens in rows) else LOW_TILE
        lines = tile_lines(rows, height)
        table = upload(lines, self._device, torch.int32) if lines else self._table[:0]
        self._tiles = Tiles(table, height)

    def apply(self, x: Tensor, y: Tensor, group: str) -> None:
        """Add x A^T B of each row's adapter to y [..., width of the group], contiguous; x [..., in_features]."""
        for call in self.launches(x, y, group):
            call.launch()

    def launches(self, x: Tensor, y: Tensor, group: str) -> tuple[KernelCall, ...]:
        """Return the launches of `apply`, in order."""
        if not len(self._tiles):
            return ()
        slots = self._groups[group]
        rows, out = x.reshape(-1, slots.in_features), y.view(-1, sum(slots.widths))
        sums = torch.empty(
            slots.splits, len(rows), len(slots.widths), slots.rank_space, dtype=torch.float32, device=x.device
        )
        return (shrink_call(rows, slots, self._tiles, sums), expand_call(out, sums, slots, self._tiles))


def adapt_linears(
    model: nn.Module,
    linears: Mapping[str, tuple[int, int]],
    slots: int,
    max_rank: int,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
) -> CudaLora:
    """Replace a model's linear layers by adaptable ones, allocate all slots, and compile the kernels.

    `rows` is the maximum that a step decodes.
    """
    groups = {names[0]: names for names in _groups(model, linears)}
    lora = CudaLora(linears, groups, slots, max_rank, rows, dtype, device)
    for name, members in groups.items():
        place_parts(model, members, _CudaGroup(_linears(model, members), lora, name))
    lora.warm_up()
    if device.type == "cuda":
        # Return the memory of the separate weights: torch would keep it, and KV blocks are sized by what is free.
        torch.cuda.empty_cache()
    return lora


class _CudaGroup(FusedProduct):
    """Fused linears, with each row's adapter added to their product."""

    def __init__(self, linears: Sequence[AnyLinear], lora: CudaLora, group: str) -> None:
        super().__init__(fuse(linears), [linear.out_features for linear in linears])
        self._lora = lora
        self._group = group

    def multiply(self, x: Tensor) -> Tensor:
        """Compute the base product and add the adapters: [..., in_features] to [..., sum of the widths]."""
        y = self.base(x)
        self._lora.apply(x, y, self._group)
        return y


def _groups(model: nn.Module, linears: Mapping[str, tuple[int, int]]) -> list[list[str]]:
    """Group the layers that can be fused, at most MAX_MODULES to a group; the others are groups of one."""
    groups: list[list[str]] = []
    for names in fusion_candidates(linears):
        together = len(names) <= MAX_MODULES and can_fuse(_linears(model, names))
        groups += [names] if together else [[name] for name in names]
    return groups


def _linears(model: nn.Module, names: Sequence[str]) -> list[AnyLinear]:
    layers = [model.get_submodule(name) for name in names]
    return [layer for layer in layers if is_linear(layer)]
