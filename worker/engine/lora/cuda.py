"""LoRA on CUDA: fused linears as one product, each row's adapter added from its slot by Triton kernels.

    x ──▶ q, k and v's weights, one product ──▶ y [rows, q | k | v] ──▶ CudaLora.apply(x, y) ──▶ views of y

    lora.set_decode_slots(slots, padded=8)    before a step of one token per row, captured or not
    lora.set_rows([(slot, tokens), ...])      before any other step
    lora.apply(x, y, "layers.0.qkv")          in the layers: y[row] += x[row] A^T B of the row's adapter,
                                              in two launches per group of modules (shrink, expand)

The host never waits for the device. After set_decode_slots all arguments of a launch are at fixed addresses and the
grid depends on `padded` alone, so that a CUDA graph can hold the launch: the table is overwritten before each replay.
Imported only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from worker.engine.device import KernelCall, upload
from worker.engine.lora.cuda_kernels import (
    HIGH_TILE,
    LOW_TILE,
    MAX_MODULES,
    SlotGroup,
    Tiles,
    expand_call,
    shrink_call,
    tile_lines,
)
from worker.engine.lora.fused_linears import FusedProduct, can_fuse, fuse, fusion_candidates, replace_linears
from worker.engine.lora.weights import AdapterWeights
from worker.engine.quantized.weight import AnyLinear, is_linear

_NO_TILE = (-1, 0, 0)


class CudaLora:
    """The adapter slots of a model's modules, in groups with the same input. Called by one thread."""

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

    def warm_up(self) -> None:
        """Compile all kernels before the first step; nothing is computed."""
        for height in (LOW_TILE, HIGH_TILE):
            self._tiles = Tiles(upload([_NO_TILE], self._device, torch.int32), height)
            for name, group in self._groups.items():
                self.apply(group.a.new_zeros(1, group.in_features), group.b.new_zeros(1, sum(group.widths)), name)
        self.set_rows([])

    def write_slot(self, weights: AdapterWeights, slot: int) -> None:
        """Replace a slot's adapter; the copies are queued behind all launches that are in the stream already."""
        places: list[Tensor] = []
        tensors: list[Tensor] = []
        ranks: list[int] = []
        for name, group in self._groups.items():
            for index, module in enumerate(self._modules[name]):
                pair = weights.pairs.get(module)
                rank = 0 if pair is None else len(pair.a)
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

    def set_decode_slots(self, row_slots: Sequence[int], padded: int) -> None:
        """Set the slots of the next step's rows, sorted, one token each, -1 for none; padding rows up to `padded`.

        The launches are the same for all calls with the same `padded`.
        """
        lines = tile_lines([(slot, 1) for slot in row_slots], LOW_TILE)
        # At most one tile per row, so `padded` tiles are enough.
        lines += [_NO_TILE] * (padded - len(lines))
        self._table[:padded].copy_(upload(lines, self._device, torch.int32))
        self._tiles = Tiles(self._table[:padded], LOW_TILE)

    def set_rows(self, rows: Sequence[tuple[int, int]]) -> None:
        """Set the rows until the next call: (slot or -1, tokens) in the order of the flat batch.

        The host's work is O(rows + tiles). Where no row has an adapter nothing is launched.
        """
        height = HIGH_TILE if any(slot >= 0 and tokens > LOW_TILE for slot, tokens in rows) else LOW_TILE
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


class CudaLayers:
    """Implements worker.engine.lora.adapter_memory.AdapterLayers for the model's linear layers."""

    def __init__(
        self,
        model: nn.Module,
        linears: Mapping[str, tuple[int, int]],
        slots: int,
        max_rank: int,
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Replace the layers, allocate all slots, and compile the kernels; `rows` is the maximum a step decodes."""
        groups = {names[0]: names for names in _groups(model, linears)}
        self.lora = CudaLora(linears, groups, slots, max_rank, rows, dtype, device)
        for name, members in groups.items():
            replace_linears(model, members, _CudaGroup(_linears(model, members), self.lora, name))
        self.lora.warm_up()
        if device.type == "cuda":
            # Return the memory of the separate weights: torch would keep it, and KV blocks are sized by what is free.
            torch.cuda.empty_cache()

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """See AdapterLayers."""
        self.lora.write_slot(weights, slot)

    def begin_step(self, rows: Sequence[tuple[int, int]], wanted: Sequence[int] = ()) -> None:
        """See AdapterLayers."""
        self.lora.set_rows(rows)

    def begin_decode(self, row_slots: Sequence[int], padded: int) -> None:
        """See AdapterLayers."""
        self.lora.set_decode_slots(row_slots, padded)


class _CudaGroup(FusedProduct):
    """Fused linears, with each row's adapter added to their product."""

    def __init__(self, linears: Sequence[AnyLinear], lora: CudaLora, group: str) -> None:
        super().__init__(fuse(linears), [linear.out_features for linear in linears])
        self._lora = lora
        self._group = group

    def compute(self, x: Tensor) -> Tensor:
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
