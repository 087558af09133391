"""What a layer with adapters in slots is, linear or not: the slots, and what the layer needs to know of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from worker.lora.dora import Rescale
from worker.lora.strips import Strips
from worker.lora.weights import LoraPair


class Product(Protocol):
    """A weight [out, in] that has been prepared for products: x [..., in] to [..., out]."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The product, times `factor` [rows, out] number by number."""

    def plus(self, x: Tensor, term: Tensor) -> Tensor:
        """The product plus `term`, which has its shape."""


Pack = Callable[[Tensor], Product]


@dataclass(slots=True)
class LoraStep:
    """What the layers need to know of a step; all with the same rows look at the same one.

    `segments` are (slot, first row, last row + 1). The rows [first, stop) of `panel_rows` go through the panel; `own`
    [stop - first, width] is 1 in the columns of the row's adapter and 0 in the others, where `others` is true;
    `own_by_layers` is the same side by side for groups of several layers. With `strips` the panel is used in that way.
    `rescaled` are those of the panel's rows whose adapter is a DoRA, and their slots. With `whole` the packed panel
    takes all rows of the step, and there is nothing else to do.
    """

    segments: list[tuple[int, int, int]] = field(default_factory=list)
    panel_rows: slice | None = None
    # Whether any row has an adapter.
    adapted: bool = False
    whole: bool = False
    own: Tensor | None = None
    others: Tensor | None = None
    strips: Strips | None = None
    own_by_layers: dict[int, Tensor] = field(default_factory=dict)
    rescaled: tuple[Tensor, Tensor] | None = None

    def own_for(self, layers: int) -> Tensor:
        """`own`, `layers` times side by side."""
        assert self.own is not None, "own_for is for steps with a panel"
        if layers == 1:
            return self.own
        own = self.own_by_layers.get(layers)
        if own is None:
            own = self.own_by_layers[layers] = self.own.repeat(1, layers)
        return own


class AdaptedLayer(nn.Module):
    """A layer of the base model, and slots at fixed addresses with what adapters add to it."""

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
        # Of DoRA adapters: zeros in the slots of others.
        self.rescales: Rescale | None = None

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
        change = None if pair is None else self._install_rescale(slot, pair.rescale, slots)
        if self.rescales is not None and change is None:
            self.rescales.gain[slot], self.rescales.shift[slot] = 0, 0
        if pair is not None:
            rank = len(pair.a)
            held = LoraPair(self.a[slot, :rank], self.b[slot, :rank], change)
            held.a.copy_(pair.a)
            held.b.copy_(pair.b)
            self.pairs[slot] = held

    def add_segment(self, out: Tensor, shrunk: Tensor, pair: LoraPair) -> None:
        """Change the base's output [rows, out_features] of rows of one adapter; `shrunk` [rows, rank] is x A^T."""
        if pair.rescale is not None:
            out.addcmul_(out, pair.rescale.gain).add_(pair.rescale.shift)
        out.addmm_(shrunk, pair.b)

    def _install_rescale(self, slot: int, change: Rescale | None, slots: int) -> Rescale | None:
        if change is None:
            return None
        if self.rescales is None:
            gain = change.gain.new_zeros(slots, self.out_features)
            self.rescales = Rescale(gain, torch.zeros_like(gain))
        held = Rescale(self.rescales.gain[slot], self.rescales.shift[slot])
        held.gain.copy_(change.gain)
        held.shift.copy_(change.shift)
        return held


class LoraEmbedding(AdaptedLayer):
    """Token embeddings: a row of A^T for each token, times B. `in_features` is the vocabulary."""

    def forward(self, ids: Tensor) -> Tensor:
        """The base's rows plus each adapter's: [...] to [..., out_features]."""
        y: Tensor = self.base(ids)
        if self.a is None:
            return y
        out, flat = y.view(-1, self.out_features), ids.reshape(-1)
        for slot, first, stop in self.step.segments:
            pair = self.pairs[slot]
            if pair is not None:
                self.add_segment(out[first:stop], pair.a.index_select(1, flat[first:stop]).t(), pair)
        return y
