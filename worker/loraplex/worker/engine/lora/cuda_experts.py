"""Adapters of experts on CUDA: pairs of a token and an expert are the rows of LoRA's kernels.

    pairs, sorted   │ expert 0, no adapter │ expert 0, slot 2 │ expert 3, slot 1 │ ...
    up, down          one grouped product of all experts each
    tiles                                  │ 2 * experts + 0  │ 1 * experts + 3  │ ...    slots of the kernels

Each expert has slots of its own. Which pairs there are the device alone knows, and the host never waits for it: a
kernel writes the table of tiles, with a line for each pair, most of which are no tiles. Imported only where Triton is
installed.
"""

# ruff: noqa: N803 - kernels' compile-time arguments are in capitals
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from loraplex.contracts.artifacts.experts import ExpertSizes
from loraplex.worker.engine.device import KernelCall, upload
from loraplex.worker.engine.lora.cuda import LOW_TILE, SlotGroup, Tiles, expand_call, shrink_call
from loraplex.worker.engine.lora.weights import AdapterLayers, AdapterWeights


@triton.jit(do_not_specialize=["pairs"])
def tile_pairs(  # type: ignore[no-untyped-def]
    table, keys, pairs, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, HEIGHT: tl.constexpr
):
    """Write a line of Tiles.table for each pair of sorted keys, expert * (SLOTS + 1) + slot + 1. Grid: pair.

    A tile begins where the key changes, and at each multiple of HEIGHT.
    """
    at = tl.program_id(0)
    lane = tl.arange(0, HEIGHT)
    key = tl.load(keys + at)
    before = tl.load(keys + at - 1, mask=at % HEIGHT > 0, other=-1)
    inside = (at + lane < pairs) & (at % HEIGHT + lane < HEIGHT)
    rows = tl.sum((tl.load(keys + at + lane, mask=inside, other=-1) == key).to(tl.int32), 0)
    slot, expert = key % (SLOTS + 1) - 1, key // (SLOTS + 1)
    begins = (before != key) & (slot >= 0)
    tl.store(table + at * 3, tl.where(begins, slot * EXPERTS + expert, -1).to(tl.int32))
    tl.store(table + at * 3 + 1, at)
    tl.store(table + at * 3 + 2, rows)


class CudaExperts:
    """Implements loraplex.worker.engine.lora.weights.AdapterLayers, for a model's experts and its other layers."""

    def __init__(
        self,
        linears: AdapterLayers,
        experts: Mapping[str, ExpertSizes],
        slots: int,
        max_rank: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate all slots: slots * max_rank * (in_features + out_features) elements for each expert.

        `linears` are the model's other layers; `experts` are the tensors of experts by name; `rows` is the largest
        `padded`.
        """
        self._linears = linears
        self._experts = experts
        self._device = device
        self.slots = slots
        self.groups = {
            name: SlotGroup(sizes.in_features, [sizes.out_features], slots * sizes.experts, max_rank, dtype, device)
            for name, sizes in experts.items()
        }
        # The slot of each row of a step, or -1; None: no row has an adapter.
        self.row_slots: Tensor | None = None
        self._decode_slots = torch.full((rows,), -1, dtype=torch.int64, device=device)

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """See AdapterLayers."""
        self._linears.install(weights, slot)
        places: list[Tensor] = []
        tensors: list[Tensor] = []
        ranks: list[int] = []
        for name, group in self.groups.items():
            pair, own = weights.pairs.get(name), self._own(name, slot)
            ranks += [0 if pair is None else pair.rank] * self._experts[name].experts
            if pair is not None:
                columns = pair.rank * group.widths[0]
                places += [group.a[own, 0, : pair.rank], group.b[own, :columns].view(pair.b.shape)]
                tensors += pair.tensors
        if places:
            torch._foreach_copy_(places, tensors, non_blocking=True)
        of_groups = [group.ranks[self._own(name, slot), 0] for name, group in self.groups.items()]
        parts = torch.split(upload(ranks, self._device, torch.int32), [len(one) for one in of_groups])
        torch._foreach_copy_(of_groups, list(parts))

    def _own(self, name: str, slot: int) -> slice:
        experts = self._experts[name].experts
        return slice(slot * experts, (slot + 1) * experts)

    def begin_step(self, rows: Sequence[tuple[int, int]], logit_counts: Sequence[int] = ()) -> None:
        """See AdapterLayers."""
        self._linears.begin_step(rows, logit_counts)
        slots, counts = zip(*rows, strict=True) if rows else ((), ())
        self.row_slots = upload(np.repeat(slots, counts), self._device) if max(slots, default=-1) >= 0 else None

    def begin_decode(self, row_slots: Sequence[int], padded: int) -> None:
        """See AdapterLayers."""
        self._linears.begin_decode(row_slots, padded)
        slots = [*row_slots, *[-1] * (padded - len(row_slots))]
        self.row_slots = self._decode_slots[:padded]
        self.row_slots.copy_(upload(slots, self._device, torch.int64))

    def tiles_call(self, keys: Tensor, experts: int) -> KernelCall:
        """Return the launch that writes the table of tiles, its argument `table`, of sorted keys [pairs]."""
        table = torch.empty(len(keys), 3, dtype=torch.int32, device=keys.device)
        return KernelCall(
            tile_pairs,
            (len(keys),),
            {"table": table, "keys": keys, "pairs": len(keys)},
            {"SLOTS": self.slots, "EXPERTS": experts, "HEIGHT": LOW_TILE},
            warps=1,
            stages=1,
        )

    def launches(self, name: str, x: Tensor, y: Tensor, tiles: Tiles) -> tuple[KernelCall, ...]:
        """Return the launches that add the adapters to y [pairs, out_features], of x [pairs, in_features]."""
        group = self.groups[name]
        sums = torch.empty(group.splits, len(x), 1, group.rank_space, dtype=torch.float32, device=x.device)
        return shrink_call(x, group, tiles, sums), expand_call(y, sums, group, tiles)


class _LayerExperts:
    """The experts of a layer; called as transformers' module is."""

    def __init__(self, module: Any, name: str, adapters: CudaExperts, tensors: Sequence[str]) -> None:
        # A reference to the module, which refers to this, would keep it from being freed by its last one.
        self._module = ref(module)
        self._name = name
        self._adapters = adapters
        self._tensors = tensors
        self._several = adapters.slots + 1
        count = len(module.down_proj)
        self._ends = self._several * torch.arange(1, count + 1, device=module.down_proj.device)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return each token's sum over its experts: [tokens, features]; index and weights are [tokens, experts]."""
        module, (tokens, count), row_slots = self._module(), top_k_index.shape, self._adapters.row_slots
        assert module is not None, "the module is calling"
        keys = top_k_index * self._several
        if row_slots is not None:
            keys += row_slots[:, None] + 1
        keys, order = keys.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(keys, self._ends, out_int32=True)
        tiles = None
        if row_slots is not None:
            call = self._adapters.tiles_call(keys, len(self._ends))
            call.launch()
            tiles = Tiles(call.arguments["table"], LOW_TILE)
        up, down = self._tensors
        inner = self._product(module, up, hidden_states.index_select(0, order // count), keys, ends, tiles)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        outputs = self._product(module, down, inner, keys, ends, tiles)
        if getattr(module, "has_post_expert_norm", False):
            outputs = module.post_expert_norm(outputs)
        products = outputs * top_k_weights.reshape(-1).index_select(0, order)[:, None]
        weighted = torch.empty_like(products).index_copy_(0, order, products)
        return weighted.view(tokens, count, -1).sum(1).to(hidden_states.dtype)

    def _product(self, module: Any, tensor: str, x: Tensor, keys: Tensor, ends: Tensor, tiles: Tiles | None) -> Tensor:
        weight, bias = getattr(module, tensor), getattr(module, f"{tensor}_bias", None)
        y = grouped_mm(x.contiguous(), weight if module.is_transposed else weight.transpose(-2, -1), offs=ends)
        if bias is not None:
            y += bias.index_select(0, keys // self._several)
        if tiles is not None:
            for call in self._adapters.launches(f"{self._name}.{tensor}", x.contiguous(), y, tiles):
                call.launch()
        return y


def adapt_experts(
    linears: AdapterLayers,
    model: nn.Module,
    experts: Mapping[str, ExpertSizes],
    slots: int,
    max_rank: int,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
) -> CudaExperts:
    """Replace a model's experts by adaptable ones, and allocate all slots. See CudaExperts."""
    adapters = CudaExperts(linears, experts, slots, max_rank, rows, dtype, device)
    for name in dict.fromkeys(tensor.rpartition(".")[0] for tensor in experts):
        module = model.get_submodule(name)
        tensors = [tensor.rpartition(".")[2] for tensor in experts if tensor.rpartition(".")[0] == name]
        module.forward = _LayerExperts(module, name, adapters, tensors)
    return adapters
