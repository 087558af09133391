"""Chooses the layouts of a model's linear layers on the CPU, and the dtype that it computes in, by measuring them.

Every layout is exact for the model's own dtype, so the fastest is taken: the largest layers are laid out in each way,
one after the other, and multiplied with a few rows and with many, from memory, not from the cache, as steps do. A
layout in which a row's bits depend on the rows beside it is taken only where all are of this kind: an answer would
depend on its company.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from loraplex.worker.engine.device import dtype_name, return_freed_memory
from loraplex.worker.engine.linear.layouts import Layout, float_layouts, is_narrow, narrow_layouts, quantized_layouts
from loraplex.worker.engine.quantized.layers import AnyLinear, QuantizedLinear, is_linear

_log = logging.getLogger(__name__)

# Rows of the measured products: a lone request's decode, a batch's, a part of a prompt, and a whole one.
_ROWS = (1, 8, 64, 512)
# Number of shapes of layers that are measured, the largest, and of runs, of which the fastest counts.
_SHAPES = 2
_RUNS = 4
# A layout whose first run takes so many times as long as the fastest so far is not run again.
_HOPELESS = 2.0
# Bytes that are written between two runs, so that no weight is in the cache.
_CACHE_BYTES = 64 * 2**20

# A dtype that is not the model's own has to take so many times less: it changes the size of adapters and KV cache.
_MUCH = 1.1


@dataclass(frozen=True)
class LayoutTrial:
    """A layout of the weights of one kind, for inputs of dtype `compute`."""

    compute: torch.dtype
    kind: str
    layout: Layout


@dataclass(frozen=True)
class LayoutChoice:
    """The dtype that a model computes in, and the layouts of its linear layers, by kind of weight: see kind_of."""

    compute: torch.dtype
    layouts: Mapping[str, Layout]

    def make(self, linear: AnyLinear) -> nn.Module:
        """Return the layer that takes a linear layer's place; itself, where there is no layout for its weight."""
        layout = self.layouts.get(kind_of(linear))
        return linear if layout is None else layout.make(linear)


def kind_of(linear: AnyLinear) -> str:
    """Return the kind of a layer's weight: the name of its dtype, or of its codes, for example int8."""
    if not isinstance(linear, QuantizedLinear):
        return dtype_name(linear.weight.dtype)
    codes = linear.weight.codes
    return dtype_name(codes.dtype) if codes.is_floating_point() else f"int{linear.weight.bits}"


def unmeasured(model: nn.Module, compute: torch.dtype) -> LayoutChoice:
    """Choose the layouts for a model so small that measuring would not pay."""
    kinds = {kind_of(layer) for layer in model.modules() if is_linear(layer)}
    options = {kind: next(_layouts(kind, compute, rounded=False), None) for kind in kinds}
    return LayoutChoice(compute, {kind: layout for kind, layout in options.items() if layout is not None})


@torch.inference_mode()
def measured(model: nn.Module, own: torch.dtype, computes: Sequence[torch.dtype]) -> LayoutChoice:
    """Choose the fastest layouts, and, of the dtypes `computes`, the one to compute in; log what was chosen, and why.

    `own` is the model's dtype, for which the layouts are exact. Another has to be faster by _MUCH.
    """
    seconds: dict[LayoutTrial, float] = {}
    for kind, samples in _samples(model).items():
        candidates = [
            LayoutTrial(compute, kind, layout)
            for compute in computes
            for layout in (*_layouts(kind, compute, rounded=own != torch.float32), *_narrow_layouts(samples, compute))
        ]
        times = [_measure(layer, count, candidates) for layer, count in samples]
        return_freed_memory()
        alike = [candidate for candidate in candidates if all(candidate in of_layer for of_layer in times)]
        for candidate in alike:
            # Every number of rows weighs the same, though the larger takes longer.
            by_rows = [sum(of_layer[candidate][index] for of_layer in times) for index in range(len(_ROWS))]
            seconds[candidate] = prod(by_rows) ** (1 / len(by_rows))
    fastest = {compute: _fastest(seconds, compute) for compute in computes}
    total = {compute: sum(seconds[candidate] for candidate in fastest[compute]) for compute in computes}
    compute = min(computes, key=lambda compute: total[compute] * (1 if compute == own else _MUCH))
    if seconds:
        _log.info("%s", _sentence(seconds, compute, fastest[compute]))
    chosen = {candidate.kind: candidate.layout for candidate in fastest[compute]}
    return LayoutChoice(compute, {**unmeasured(model, compute).layouts, **chosen})


def _layouts(kind: str, compute: torch.dtype, *, rounded: bool) -> Iterator[Layout]:
    if kind.startswith("int"):
        return quantized_layouts(int(kind.removeprefix("int")), compute, rounded=rounded)
    return float_layouts(getattr(torch, kind), compute) if kind in ("float32", "bfloat16") else iter(())


def _narrow_layouts(samples: Sequence[tuple[AnyLinear, int]], compute: torch.dtype) -> Iterator[Layout]:
    return narrow_layouts(compute) if all(is_narrow(layer) for layer, _ in samples) else iter(())


def _samples(model: nn.Module) -> dict[str, list[tuple[AnyLinear, int]]]:
    """Return a layer of each of the largest shapes, and how many the model has of it, by kind of weight."""
    shapes: dict[tuple[str, int, int], list[AnyLinear]] = defaultdict(list)
    for layer in model.modules():
        if is_linear(layer):
            shapes[kind_of(layer), layer.out_features, layer.in_features].append(layer)
    # A shape that the model has once is its head's: it would take as long to lay out as all others together.
    repeated = [(shape, layers) for shape, layers in shapes.items() if len(layers) > 1]
    samples: dict[str, list[tuple[AnyLinear, int]]] = defaultdict(list)
    for (kind, _, _), layers in sorted(repeated, key=lambda one: -one[0][1] * one[0][2] * len(one[1])):
        if len(samples[kind]) < _SHAPES:
            samples[kind].append((layers[0], len(layers)))
    return dict(samples)


def _measure(layer: AnyLinear, count: int, candidates: Sequence[LayoutTrial]) -> dict[LayoutTrial, list[float]]:
    """Return the seconds of `count` such layers in each layout, for each of _ROWS.

    Layouts whose rows depend on others are left out, unless all are of this kind.
    """
    flush = torch.zeros(_CACHE_BYTES // 4)
    laid_out = {candidate: candidate.layout.make(layer) for candidate in candidates}
    alike = [candidate for candidate in candidates if _rows_are_alike(laid_out[candidate], layer, candidate.compute)]
    candidates = alike or candidates
    seconds: dict[LayoutTrial, list[float]] = {candidate: [] for candidate in candidates}
    for rows in _ROWS:
        fastest = dict.fromkeys(candidates, float("inf"))
        # In turn: what else the machine does meets all of them alike.
        for _ in range(_RUNS):
            best = min(fastest.values())
            for candidate in candidates:
                if _HOPELESS * best < fastest[candidate] < float("inf"):
                    continue
                x = torch.ones(rows, layer.in_features, dtype=candidate.compute)
                flush.add_(1)
                start = time.perf_counter()
                laid_out[candidate](x)
                fastest[candidate] = min(fastest[candidate], time.perf_counter() - start)
        for candidate, taken in fastest.items():
            seconds[candidate].append(count * taken)
    return seconds


def _rows_are_alike(laid_out: nn.Module, layer: AnyLinear, compute: torch.dtype) -> bool:
    """Tell whether a row's product has the same bits alone as among many."""
    x = torch.randn(_ROWS[-1], layer.in_features, generator=torch.Generator().manual_seed(0)).to(compute)
    y = laid_out(x)
    return all(torch.equal(laid_out(x[:rows]), y[:rows]) for rows in _ROWS[:-1])


def _fastest(seconds: Mapping[LayoutTrial, float], compute: torch.dtype) -> list[LayoutTrial]:
    """Return the fastest candidate of each kind of weight."""
    fastest: dict[str, LayoutTrial] = {}
    for candidate in sorted(seconds, key=lambda candidate: seconds[candidate]):
        if candidate.compute == compute:
            fastest.setdefault(candidate.kind, candidate)
    return list(fastest.values())


def _sentence(seconds: Mapping[LayoutTrial, float], compute: torch.dtype, chosen: Sequence[LayoutTrial]) -> str:
    """Say what was chosen, with the time of all candidates."""
    times = ", ".join(
        f"{candidate.layout.name} with {dtype_name(candidate.compute)} inputs {taken * 1e3:.1f} ms"
        for candidate, taken in sorted(seconds.items(), key=lambda one: one[1])
    )
    names = " and ".join(candidate.layout.name for candidate in chosen)
    return (
        f"the model computes in {dtype_name(compute)}, its linear layers as {names}; "
        f"a step's largest layers take: {times}"
    )
