"""Methods that add each row's own adapter to the output of a linear layer, for bench.lora_layer.

Each method adds x A^T B to the base layer's given output; none computes the base product. The work that a model does
once a step for all of its layers (sorting, indices) is in `prepare`, which is not timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear

from loraplex.worker.engine.lora.cpu import CpuLayers
from loraplex.worker.engine.lora.weights import AdapterWeights, LoraPair

DTYPE = torch.bfloat16
NONE = -1


class Adapters:
    """The adapters of several layers of one shape, padded to the largest rank: `a` and `b` [adapters, rank, features].

    Each layer has its own weights, so that they do not fit into the cache together, as in a model.
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
        """Return an adapter's weights of a layer, without the padding."""
        rank = self.ranks[adapter]
        return LoraPair(self.a[layer][adapter, :rank], self.b[layer][adapter, :rank])


class GivenOutput(nn.Module):
    """Stands in for a base layer and returns a given output."""

    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self.y = y

    def forward(self, _: Tensor) -> Tensor:
        """Return the given output."""
        return self.y


class Method(Protocol):
    """A way to apply the adapters."""

    def prepare(self, rows: Sequence[int]) -> None:
        """Set the rows of the next `apply` calls: each row's adapter or NONE, sorted."""

    def apply(self, layer: int, x: Tensor) -> Tensor:
        """Return the layer's base output plus the adapters' change for x [rows, features]; may write to that output."""


class _RememberedRows:
    """The state of a method that reads the rows in every layer."""

    def __init__(self, adapters: Adapters, bases: Sequence[GivenOutput]) -> None:
        self._adapters = adapters
        self._bases = bases
        self._rows: Sequence[int] = ()

    def prepare(self, rows: Sequence[int]) -> None:
        """See Method."""
        self._rows = rows


class LoopOverRows(_RememberedRows):
    """Two small products for each row."""

    def apply(self, layer: int, x: Tensor) -> Tensor:
        """See Method."""
        y: Tensor = self._bases[layer](x)
        for row, adapter in enumerate(self._rows):
            if adapter != NONE:
                pair = self._adapters.pair(layer, adapter)
                y[row : row + 1].addmm_(linear(x[row : row + 1], pair.a), pair.b)
        return y


class Gathered:
    """Copies of every row's A and B for two batched products; ranks are padded to the largest."""

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
        """See Method. As in peft, each layer finds the adapters' rows again."""
        y: Tensor = self._bases[layer](x)
        unique = set(self._rows)
        of_adapter = [[row for row, other in enumerate(self._rows) if other == adapter] for adapter in unique]
        for adapter, rows in zip(unique, of_adapter, strict=True):
            if adapter != NONE:
                pair = self._adapters.pair(layer, adapter)
                y[rows] += linear(linear(x[rows], pair.a), pair.b.t()) * 1.0
        return y


class Grouped:
    """Uses torch's grouped_mm over the sorted rows, with a group for each adapter; ranks are padded to the largest."""

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
    """Uses the engine's own layers, with every adapter in a slot."""

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
        """See Method; begins a step as the engine does before decode rows."""
        self._lora.begin_step([(slot, 1) for slot in rows])

    def apply(self, layer: int, x: Tensor) -> Tensor:
        """See Method."""
        out: Tensor = self._linears[layer](x)
        return out


def rows_by_loop(adapters: Adapters, rows: Sequence[int], layer: int, x: Tensor, y: Tensor) -> Tensor:
    """Compute the result that every method must give, in float32."""
    out = y.float()
    for adapter, group in groupby(range(len(rows)), key=lambda row: rows[row]):
        if adapter != NONE:
            pair = adapters.pair(layer, adapter)
            at = list(group)
            out[at] += x[at].float() @ pair.a.float().t() @ pair.b.float()
    return out
