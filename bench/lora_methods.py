"""Ways to add each row's own adapter to the output of a linear layer: what bench.lora_layer compares.

All get the base layer's output and add x A^T B to it; none computes the base product. What a model would do once a step
for all of its layers (sorting, indices) is done in `prepare`, which is not timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear

from worker.engine.lora.cpu.layers import CpuLayers
from worker.engine.lora.weights import AdapterWeights, LoraPair

DTYPE = torch.bfloat16
NONE = -1


class Adapters:
    """The adapters of several layers of one shape, padded to the largest rank: `a` and `b` [adapters, rank, features].

    Each layer has weights of its own, so that together they do not fit into the cache, as in a model.
    """

    def __init__(self, ranks: Sequence[int], features: int, layers: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ranks = tuple(ranks)
        self.features = features
        self.a: list[Tensor] = []
        self.b: list[Tensor] = []
        for _ in range(layers):
            for side in (self.a, self.b):
                stack = torch.zeros(len(ranks), max(ranks), features, dtype=DTYPE)
                for adapter, rank in enumerate(ranks):
                    stack[adapter, :rank] = torch.randn(rank, features, generator=generator).mul_(0.02).to(DTYPE)
                side.append(stack)

    def pair(self, layer: int, adapter: int) -> LoraPair:
        """One adapter's share of a layer, without the padding."""
        rank = self.ranks[adapter]
        return LoraPair(self.a[layer][adapter, :rank], self.b[layer][adapter, :rank])


class GivenOutput(nn.Module):
    """In the place of a base layer, for all methods: its output, which is there already."""

    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self.y = y

    def forward(self, _: Tensor) -> Tensor:
        """The output."""
        return self.y


class Method(Protocol):
    """One way."""

    def prepare(self, rows: Sequence[int]) -> None:
        """The adapter of each row, or NONE; sorted. What comes next is for these."""

    def apply(self, layer: int, x: Tensor) -> Tensor:
        """The layer's base output plus what the adapters make of x [rows, features]; may write to the former."""


class _RememberedRows:
    """What a method needs that looks at the rows in every layer."""

    def __init__(self, adapters: Adapters, bases: Sequence[GivenOutput]) -> None:
        self._adapters = adapters
        self._bases = bases
        self._rows: Sequence[int] = ()

    def prepare(self, rows: Sequence[int]) -> None:
        """See Method."""
        self._rows = rows


class LoopOverRows(_RememberedRows):
    """Row by row: two small products each."""

    def apply(self, layer: int, x: Tensor) -> Tensor:
        """See Method."""
        y: Tensor = self._bases[layer](x)
        for row, adapter in enumerate(self._rows):
            if adapter != NONE:
                pair = self._adapters.pair(layer, adapter)
                y[row : row + 1].addmm_(linear(x[row : row + 1], pair.a), pair.b)
        return y


class Gathered:
    """Every row's A and B copied to where two batched products want them; ranks are padded to the largest."""

    def __init__(self, adapters: Adapters, bases: Sequence[GivenOutput]) -> None:
        self._adapters = adapters
        self._bases = bases

    def prepare(self, rows: Sequence[int]) -> None:
        """See Method."""
        self._first = sum(adapter == NONE for adapter in rows)
        self._index = torch.tensor(rows[self._first :])

    def apply(self, layer: int, x: Tensor) -> Tensor:
        """See Method."""
        y: Tensor = self._bases[layer](x)
        a = self._adapters.a[layer].index_select(0, self._index)
        b = self._adapters.b[layer].index_select(0, self._index)
        adapted = y[self._first :]
        adapted += torch.bmm(torch.bmm(x[self._first :, None], a.transpose(1, 2)), b)[:, 0]
        return y


class PeftsWay(_RememberedRows):
    """A loop over the batch's adapters, each with its rows: peft 0.21, lora/layer.py, _mixed_batch_forward."""

    def apply(self, layer: int, x: Tensor) -> Tensor:
        """See Method. Which rows are whose is looked up in every layer, as there."""
        y: Tensor = self._bases[layer](x)
        unique = set(self._rows)
        of_adapter = [[row for row, other in enumerate(self._rows) if other == adapter] for adapter in unique]
        for adapter, rows in zip(unique, of_adapter, strict=True):
            if adapter != NONE:
                pair = self._adapters.pair(layer, adapter)
                y[rows] += linear(linear(x[rows], pair.a), pair.b.t()) * 1.0
        return y


class Grouped:
    """torch's grouped_mm over the sorted rows, an adapter a group; ranks are padded to the largest."""

    def __init__(self, adapters: Adapters, bases: Sequence[GivenOutput]) -> None:
        self._adapters = adapters
        self._bases = bases

    def prepare(self, rows: Sequence[int]) -> None:
        """See Method."""
        self._first = sum(adapter == NONE for adapter in rows)
        counts = torch.bincount(torch.tensor(rows[self._first :]), minlength=len(self._adapters.ranks))
        self._ends = counts.cumsum(0).to(torch.int32)

    def apply(self, layer: int, x: Tensor) -> Tensor:
        """See Method."""
        y: Tensor = self._bases[layer](x)
        shrunk = grouped_mm(x[self._first :], self._adapters.a[layer].transpose(1, 2), offs=self._ends)
        adapted = y[self._first :]
        adapted += grouped_mm(shrunk, self._adapters.b[layer], offs=self._ends)
        return y


class Ours:
    """The engine's own layers, every adapter in a slot."""

    def __init__(self, adapters: Adapters, bases: Sequence[GivenOutput]) -> None:
        model = nn.ModuleList(nn.ModuleDict({"linear": base}) for base in bases)
        names = [f"{layer}.linear" for layer in range(len(bases))]
        shapes = dict.fromkeys(names, (adapters.features, adapters.features))
        self._lora = CpuLayers(model, shapes, len(adapters.ranks), max(adapters.ranks), DTYPE)
        self._linears = [model.get_submodule(name) for name in names]
        for adapter, rank in enumerate(adapters.ranks):
            pairs = {name: adapters.pair(layer, adapter) for layer, name in enumerate(names)}
            self._lora.install(AdapterWeights(pairs, rank), adapter)

    def prepare(self, rows: Sequence[int]) -> None:
        """See Method: what the engine does before a step of decode rows."""
        self._lora.begin_step([(slot, 1) for slot in rows])

    def apply(self, layer: int, x: Tensor) -> Tensor:
        """See Method."""
        out: Tensor = self._linears[layer](x)
        return out


def rows_by_loop(adapters: Adapters, rows: Sequence[int], layer: int, x: Tensor, y: Tensor) -> Tensor:
    """The oracle, in float32: what every method is to give."""
    out = y.float()
    for adapter, group in groupby(range(len(rows)), key=lambda row: rows[row]):
        if adapter != NONE:
            pair = adapters.pair(layer, adapter)
            at = list(group)
            out[at] += x[at].float() @ pair.a.float().t() @ pair.b.float()
    return out
