"""One linear layer with adapters in slots; layers.py tells how a step's rows are split among the ways to apply them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.functional import linear

from worker.lora.panel import Columns
from worker.lora.weights import LoraPair

# A weight [out, in] that has been prepared for products: x [rows, in] to [rows, out].
Product = Callable[[Tensor], Tensor]
Pack = Callable[[Tensor], Product]


@dataclass(slots=True)
class LoraStep:
    """What the layers need to know of a step; all of them look at the same one.

    `segments` are (slot, first row, last row + 1). With a panel, the rows before `panel_rows` go through it, and
    `foreign` [panel_rows, width] marks the columns that are not the row's adapter's.
    """

    segments: list[tuple[int, int, int]] = field(default_factory=list)
    panel_rows: int = 0
    foreign: Tensor | None = None


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
        self.packed_panel: tuple[Product, Product] | None = None
        self._panel_store: LoraPair | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The base layer's output plus each row's adapter's: [..., in_features] to [..., out_features]."""
        y: Tensor = self.base(x)
        step = self.step
        if self.a is None or not (step.segments or step.panel_rows):
            return y
        rows, out = x.reshape(-1, self.in_features), y.view(-1, self.out_features)
        if step.foreign is not None and self.panel is not None:
            self._add_panel(rows[: step.panel_rows], out[: step.panel_rows], self.panel, step.foreign)
        for slot, first, stop in step.segments:
            pair = self.pairs[slot]
            if pair is not None:
                out[first:stop].addmm_(linear(rows[first:stop], pair.a), pair.b)
        return y

    def install(self, slot: int, pair: LoraPair | None, slots: int, max_rank: int) -> None:
        """Put a pair in a slot, in place of what was there; None: the adapter does not change this layer."""
        if self.a is None or self.b is None:
            if pair is None:
                return
            # Not zeroed: on the CPU memory is then taken when it is written, for the ranks that adapters have. Nothing
            # behind a pair's own rank is ever read.
            self.a = pair.a.new_empty(slots, max_rank, self.in_features)
            self.b = pair.b.new_empty(slots, max_rank, self.out_features)
            self.pairs = [None] * slots
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
        self.packed_panel = None

    def pack_panel(self, pack: Pack) -> None:
        """Make the panel's products faster, until it changes."""
        if self.panel is not None:
            self.packed_panel = (pack(self.panel.a), pack(self.panel.b.t()))

    def _add_panel(self, rows: Tensor, out: Tensor, panel: LoraPair, foreign: Tensor) -> None:
        # Filled, not multiplied: another adapter's column may have overflowed for this row.
        if self.packed_panel is None:
            out.addmm_(linear(rows, panel.a).masked_fill_(foreign, 0), panel.b)
        else:
            shrink, expand = self.packed_panel
            out.add_(expand(shrink(rows).masked_fill_(foreign, 0)))
