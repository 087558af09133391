"""LoRA beside the base model's linear layers: every row of a batch with its own adapter.

Each layer holds its adapters in slots at fixed addresses. The rows of a step are sorted by slot, in two parts:

    decode rows     the panel: their adapters' A's one below the other, and so the B's, as one product for all rows, a
                    row's columns of the other adapters zeroed in between
                    or, where most of that product would be zeroed, a product for each adapter with its own rows:
                    strips
    prefill chunks  y[rows] += (x[rows] A^T) B for each adapter, from its slot

Layers that are called with the same input (q, k, v; gate, up) share the first product of the panel, once it is packed.

Rows without an adapter keep their numbers, bit for bit (but for the sign of a zero). Work for a step is O(its
adapters), whatever is resident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

import torch
from torch import Tensor, nn

from worker.lora.adapted import AdaptedLayer, LoraEmbedding, LoraStep, Pack
from worker.lora.linear import LoraLinear, SharedShrink
from worker.lora.panel import Columns, PanelLayout
from worker.lora.siblings import sibling_groups
from worker.lora.strips import Strips, strips_of
from worker.lora.weights import AdapterWeights
from worker.staging import upload

# The panel's columns of one adapter are a multiple of this.
_COLUMN_UNIT = 8
# Packing costs about as much as it saves in a few steps: it waits until the panel has not changed for so many, and then
# takes so many columns of groups of layers a step.
_CALM_STEPS = 4
_COLUMNS_PACKED_A_STEP = 1536
# Up to so many rows times columns, rows without an adapter take part in the panel, all their columns zeroed: measured,
# to take the others out and put them back costs more.
_WHOLE_UP_TO = 512
# No slot has this number, and no row either.
_NO_OWNER = -2


class LoraLayers:
    """All of a model's adaptable linear layers, wrapped; from one thread."""

    def __init__(
        self,
        model: nn.Module,
        linears: Mapping[str, tuple[int, int]],
        slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
        pack: Pack | None = None,
        ends: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        """`linears` and `ends` are (in_features, out_features) by name: the layers between, and embeddings and head."""
        self._slots = slots
        self._max_rank = max_rank
        self._device = device
        self._dtype = dtype
        self._pack = pack
        self._step = LoraStep()
        # The embeddings see all rows of a step, the head those whose logits are wanted: one adapter after the other.
        self._embedding_step = LoraStep()
        self._head_step = LoraStep()
        self._layout = PanelLayout()
        self._owner = torch.empty(0, dtype=torch.int64, device=device)
        self._capacity = 0
        self._unpacked: list[list[LoraLinear]] = []
        self._calm_steps = 0
        # Rank of the adapter in each slot, and whether it is a DoRA.
        self._ranks = [0] * slots
        self._rescales = [False] * slots
        self._layers = {name: LoraLinear(model.get_submodule(name), *linears[name], self._step) for name in linears}
        self._ends: dict[str, AdaptedLayer] = {}
        for name, shape in ends.items():
            base = model.get_submodule(name)
            if isinstance(base, nn.Embedding):
                self._ends[name] = LoraEmbedding(base, *shape, self._embedding_step)
            else:
                self._ends[name] = LoraLinear(base, *shape, self._head_step)
        for name, layer in (self._layers | self._ends).items():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
        self._groups = [[self._layers[name] for name in names] for names in sibling_groups(self._layers)]

    def install(self, weights: AdapterWeights, slot: int) -> None:
        """Put an adapter into a slot, in place of what was there. No row of a running step may use the slot."""
        self._layout.forget(slot)
        self._ranks[slot] = weights.rank
        self._rescales[slot] = any(pair.rescale for pair in weights.pairs.values())
        for name, layer in (self._layers | self._ends).items():
            layer.install(slot, weights.pairs.get(name), self._slots, self._max_rank)

    def begin_step(self, rows: Sequence[tuple[int, int]], decodes: int, wanted: Sequence[int] = ()) -> None:
        """See worker.lora.adapter_layers."""
        step = self._step
        step.own_by_layers = {}
        step.panel_rows = step.own = step.others = step.strips = step.rescaled = None
        step.whole = False
        self._begin_panel([slot for slot, _ in rows[:decodes]], decodes == len(rows))
        step.segments = _segments(rows[decodes:], decodes)
        step.adapted = bool(step.panel_rows or step.segments)
        if self._ends:
            self._embedding_step.segments = _segments(rows, 0)
            with_logits = [(slot, count) for (slot, _), count in zip(rows, wanted, strict=True)]
            self._head_step.segments = _segments(with_logits, 0)
            self._head_step.adapted = bool(self._head_step.segments)

    def begin_decode(self, row_slots: Sequence[int], padded: int) -> None:
        """See worker.lora.adapter_layers."""
        self.begin_step([(slot, 1) for slot in (*row_slots, *[-1] * (padded - len(row_slots)))], padded, [1] * padded)

    def _begin_panel(self, decodes: list[int], alone: bool) -> None:
        """Of the slots of decode rows, sorted; `alone`: there are no other rows."""
        step, slots = self._step, [slot for slot in decodes if slot >= 0]
        if not slots:
            return
        # Those without an adapter come first.
        first = len(decodes) - len(slots)
        self._arrange(slots)
        step.rescaled = self._rescaled(slots, first)
        step.strips = self._strips(slots)
        if step.strips is None:
            if alone and len(decodes) * self._layout.width <= _WHOLE_UP_TO:
                slots, first = decodes, 0
            columns = upload(slots, self._device, torch.int64)[:, None] == self._owner[None]
            step.own, step.others = columns.to(self._dtype), ~columns
            step.whole = alone and not first and step.rescaled is None
            self._pack_some()
        step.panel_rows = slice(first, len(decodes))

    def _rescaled(self, row_slots: list[int], first: int) -> tuple[Tensor, Tensor] | None:
        found = [(first + row, slot) for row, slot in enumerate(row_slots) if self._rescales[slot]]
        if not found:
            return None
        rows, slots = upload(list(zip(*found, strict=True)), self._device, torch.int64).unbind()
        return rows, slots

    def _arrange(self, row_slots: list[int]) -> None:
        widths = {slot: self._column_width(slot) for slot in row_slots}
        width = self._layout.width
        fresh = self._layout.arrange(widths)
        if fresh or self._layout.width != width:
            try:
                self._fill_panel(fresh)
            except BaseException:
                # For want of memory, say: some layers have the columns that the layout tells of and some have not.
                self._layout, self._capacity = PanelLayout(), 0
                raise

    def _strips(self, row_slots: list[int]) -> Strips | None:
        """None where one product for all rows is faster, or where the panel's adapters are not all as wide."""
        width = self._layout.strip_width
        if width is None:
            return None
        strips = {slot: self._layout[slot].offset // width for slot in row_slots}
        return strips_of(row_slots, strips, self._layout.width // width, width, self._device)

    def _column_width(self, slot: int) -> int:
        return min(self._max_rank, -(-self._ranks[slot] // _COLUMN_UNIT) * _COLUMN_UNIT)

    def _fill_panel(self, fresh: Sequence[Columns]) -> None:
        width, places = self._layout.width, self._layout.places()
        while self._capacity < width:
            self._capacity = max(128, 2 * self._capacity)
        owner = torch.full((width,), _NO_OWNER)
        for place in places:
            owner[place.offset : place.offset + place.width] = place.slot
        self._owner = owner.to(self._device)
        for layer in self._layers.values():
            layer.fill_panel(fresh, places, width, self._capacity)
        self._calm_steps = -1
        self._unpacked = list(self._groups) if self._pack else []

    def _pack_some(self) -> None:
        self._calm_steps += 1
        if self._pack is None or not self._unpacked or self._calm_steps <= _CALM_STEPS:
            return
        for _ in range(max(1, _COLUMNS_PACKED_A_STEP // self._layout.width)):
            if self._unpacked:
                self._pack_group(self._unpacked.pop(), self._pack)

    @staticmethod
    def _pack_group(group: Sequence[LoraLinear], pack: Pack) -> None:
        layers = [layer for layer in group if layer.panel is not None]
        if layers:
            SharedShrink(layers, pack)


def _segments(rows: Sequence[tuple[int, int]], first: int) -> list[tuple[int, int, int]]:
    segments = []
    for slot, group in groupby(rows, key=lambda row: row[0]):
        stop = first + sum(tokens for _, tokens in group)
        if slot >= 0 and stop > first:
            segments.append((slot, first, stop))
        first = stop
    return segments
