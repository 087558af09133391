"""One linear layer with adapters in slots; layers.py tells how a step's rows are split among the ways to apply them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from worker.lora.adapted import AdaptedLayer, LoraStep, Pack, Product
from worker.lora.panel import Columns
from worker.lora.weights import LoraPair


class LoraLinear(AdaptedLayer):
    """A linear layer, and the slots with what adapters add to it."""

    def __init__(self, base: nn.Module, in_features: int, out_features: int, step: LoraStep) -> None:
        super().__init__(base, in_features, out_features, step)
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
        if step.whole and self.shrink is not None and self.expand is not None:
            # For a few rows every call of torch counts, even one that makes a view.
            return self.expand.plus(self.shrink.of(self, x, x), y)
        rows, out = x.reshape(-1, self.in_features), y.view(-1, self.out_features)
        if step.panel_rows is not None and self.panel is not None:
            if step.rescaled is not None and self.rescales is not None:
                at, slots = step.rescaled
                own, gain, shift = out[at], self.rescales.gain[slots], self.rescales.shift[slots]
                out.index_copy_(0, at, own.addcmul(own, gain).add_(shift))
            first, stop = step.panel_rows.start, step.panel_rows.stop
            self._add_panel(x, rows[first:stop], out[first:stop], self.panel)
        for slot, first, stop in step.segments:
            pair = self.pairs[slot]
            if pair is not None:
                self.add_segment(out[first:stop], linear(rows[first:stop], pair.a), pair)
        return y

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

    def _add_panel(self, x: Tensor, rows: Tensor, out: Tensor, panel: LoraPair) -> None:
        """Change `out`, of the step's panel rows; `rows` are those rows of x."""
        step = self.step
        if step.strips is not None:
            step.strips.add(out, rows, panel)
        elif self.shrink is None or self.expand is None:
            assert step.others is not None, "a step with panel rows has `others`"
            # Filled, not multiplied: in float16 another adapter's column may have overflowed for this row.
            out.addmm_(linear(rows, panel.a).masked_fill_(step.others, 0), panel.b)
        else:
            out.copy_(self.expand.plus(self.shrink.of(self, x, rows), out))


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
        """The layer's share of the product with `rows`, which are of x: [..., width], 0 in the others' columns."""
        if len(self._place) == 1:
            return self._shrink.times(rows, self._step.own_for(1))
        # The same object: a layer that was called with something else meanwhile is not mistaken.
        if self._x is not x:
            shrunk = self._shrink.times(rows, self._step.own_for(len(self._place)))
            self._x, self._shrunk, self._asked = x, shrunk.split_with_sizes(self._widths, -1), 0
        part = self._shrunk[self._place[layer]]
        self._asked += 1
        if self._asked == len(self._place):
            self._x, self._shrunk = None, ()
        return part
