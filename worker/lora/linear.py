"""One linear layer with adapters in slots; layers.py tells how a step's rows are split among the ways to apply them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from worker.lora.panel import Columns
from worker.lora.weights import LoraPair


class Product(Protocol):
    """A weight [out, in] that has been prepared for products: x [rows, in] to [rows, out]."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The product, times `factor` number by number."""

    def plus(self, x: Tensor, term: Tensor) -> Tensor:
        """The product plus `term`."""


Pack = Callable[[Tensor], Product]


@dataclass(frozen=True, slots=True)
class Strips:
    """The panel as one strip of `width` columns for each of `count` adapters, all as wide, and each with its own rows.

    `pad` [count * most] are the panel's rows, strip after strip, any where a strip has fewer than `most`; `back` [rows]
    is where each row stands in that.
    """

    count: int
    width: int
    most: int
    pad: Tensor
    back: Tensor

    def of(self, rows: Tensor, panel: LoraPair) -> Tensor:
        """What the adapters add for x [rows, in_features]: [rows, out_features]. The panel is read where it lies."""
        padded = rows.index_select(0, self.pad).view(self.count, self.most, -1)
        shrunk = torch.bmm(padded, panel.a.view(self.count, self.width, -1).transpose(1, 2))
        added = torch.bmm(shrunk, panel.b.view(self.count, self.width, -1))
        return added.view(self.count * self.most, -1).index_select(0, self.back)


@dataclass(slots=True)
class LoraStep:
    """What the layers need to know of a step; all of them look at the same one.

    `segments` are (slot, first row, last row + 1). The rows [first, stop) of `panel_rows` go through the panel; `own`
    [stop - first, width] is 1 in the columns of the row's adapter and 0 in the others, `own_by_layers` the same side by
    side for groups of several layers. With `strips` the panel is used in that way.
    """

    segments: list[tuple[int, int, int]] = field(default_factory=list)
    panel_rows: slice | None = None
    # Whether any row has an adapter, and whether all rows go through the panel.
    adapted: bool = False
    only_panel: bool = False
    own: Tensor | None = None
    strips: Strips | None = None
    own_by_layers: dict[int, Tensor] = field(default_factory=dict)

    def own_for(self, layers: int) -> Tensor:
        """`own`, `layers` times side by side."""
        assert self.own is not None, "own_for is for steps with a panel"
        if layers == 1:
            return self.own
        own = self.own_by_layers.get(layers)
        if own is None:
            own = self.own_by_layers[layers] = self.own.repeat(1, layers)
        return own


class LoraLinear(nn.Module):
    """A linear layer, and the slots with what adapters add to it."""

    def __init__(self, base: nn.Module, in_features: int, out_features: int, step: LoraStep) -> None:
        super().__init__()
        self.base = base
        self.in_features = in_features
        self.out_features = out_features
        self.step = step
        # Until an adapter changes this layer it costs nothing.
        self.a: Tensor | None = None
        self.b: Tensor | None = None
        self.pairs: list[LoraPair | None] = []
        self.panel: LoraPair | None = None
        # While its panel is packed: its group's, and its own half of the product.
        self.shrink: SharedShrink | None = None
        self.expand: Product | None = None
        self._panel_store: LoraPair | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The base layer's output plus each row's adapter's: [..., in_features] to [..., out_features]."""
        y: Tensor = self.base(x)
        step = self.step
        if self.a is None or not step.adapted:
            return y
        rows, out = x.reshape(-1, self.in_features), y.view(-1, self.out_features)
        if step.panel_rows is not None and self.panel is not None:
            out = self._with_panel(x, rows, out, self.panel, step.panel_rows)
        for slot, first, stop in step.segments:
            pair = self.pairs[slot]
            if pair is not None:
                out[first:stop].addmm_(linear(rows[first:stop], pair.a), pair.b)
        return out.view(y.shape)

    def install(self, slot: int, pair: LoraPair | None, slots: int, max_rank: int) -> None:
        """Put a pair in a slot, in place of what was there; None: the adapter does not change this layer."""
        if self.a is None or self.b is None:
            if pair is None:
                return
            # Not zeroed: on the CPU memory is then taken when it is written, for the ranks that adapters have. Nothing
            # behind a pair's own rank is ever read.
            a = pair.a.new_empty(slots, max_rank, self.in_features)
            b = pair.b.new_empty(slots, max_rank, self.out_features)
            # Both or none: memory may not be enough.
            self.pairs, self.a, self.b = [None] * slots, a, b
        self.pairs[slot] = None
        if pair is not None:
            rank = len(pair.a)
            held = LoraPair(self.a[slot, :rank], self.b[slot, :rank])
            held.a.copy_(pair.a)
            held.b.copy_(pair.b)
            self.pairs[slot] = held

    def fill_panel(self, fresh: Iterable[Columns], places: Collection[Columns], width: int, capacity: int) -> None:
        """Copy slots into their columns of the panel; it then has `width` columns, in a store of `capacity`.

        `places` are all columns in use, `fresh` those of them that changed since the last call.
        """
        if self.a is None or self.b is None:
            return
        store = self._panel_store
        if store is None or store.a.shape[0] != capacity:
            # Zeros in the columns that nobody has at present.
            store = LoraPair(
                self.a.new_zeros(capacity, self.in_features), self.b.new_zeros(capacity, self.out_features)
            )
            self._panel_store = store
            fresh = places
        for place in fresh:
            pair = self.pairs[place.slot]
            first, stop = place.offset, place.offset + place.width
            if pair is not None:
                own = slice(first, first + len(pair.a))
                store.a[own], store.b[own] = pair.a, pair.b
                first = own.stop
            store.a[first:stop], store.b[first:stop] = 0, 0
        used = any(self.pairs[place.slot] is not None for place in places)
        self.panel = LoraPair(store.a[:width], store.b[:width]) if used else None
        self.shrink = self.expand = None

    def _with_panel(self, x: Tensor, rows: Tensor, out: Tensor, panel: LoraPair, at: slice) -> Tensor:
        step = self.step
        if step.strips is not None:
            out[at] += step.strips.of(rows[at], panel)
            return out
        if self.shrink is None or self.expand is None:
            assert step.own is not None, "a step with panel rows has `own`"
            # Filled, not multiplied: in float16 another adapter's column may have overflowed for this row.
            out[at].addmm_(linear(rows[at], panel.a).masked_fill_(step.own == 0, 0), panel.b)
            return out
        if step.only_panel:
            return self.expand.plus(self.shrink.of(self, x, rows), out)
        out[at] = self.expand.plus(self.shrink.of(self, x, rows[at]), out[at])
        return out


class SharedShrink:
    """The packed A's of layers that are called with the same input, side by side: one product serves them all."""

    def __init__(self, layers: Sequence[LoraLinear], pack: Pack) -> None:
        """Of the layers with a panel; packs their B's too."""
        panels = [(layer, layer.panel) for layer in layers if layer.panel is not None]
        self._step = panels[0][0].step
        self._widths = [len(panel.a) for _, panel in panels]
        self._shrink = pack(torch.cat([panel.a for _, panel in panels]))
        self._place = {layer: index for index, (layer, _) in enumerate(panels)}
        self._x: Tensor | None = None
        self._shrunk: tuple[Tensor, ...] = ()
        self._asked = 0
        for layer, panel in panels:
            layer.shrink, layer.expand = self, pack(panel.b.t().contiguous())

    def of(self, layer: LoraLinear, x: Tensor, rows: Tensor) -> Tensor:
        """The layer's share of the product with `rows`, which are of x: [rows, width], 0 in the others' columns."""
        if len(self._place) == 1:
            return self._shrink.times(rows, self._step.own_for(1))
        # The same object: a layer that was called with something else meanwhile is not mistaken.
        if self._x is not x:
            shrunk = self._shrink.times(rows, self._step.own_for(len(self._place)))
            self._x, self._shrunk, self._asked = x, shrunk.split_with_sizes(self._widths, 1), 0
        part = self._shrunk[self._place[layer]]
        self._asked += 1
        if self._asked == len(self._place):
            self._x, self._shrunk = None, ()
        return part
