"""Ways to apply adapters to a linear layer: `python -m bench.lora_layer [--quick] [--json FILE]`.

One layer of qwen2-0.4b and one of 4096 x 4096, bfloat16, batch 1 to 64, 64 adapters: a loop over rows, gathered weights
in batched products, peft's loop over adapters, torch's grouped_mm, and ours. No method computes the base product: each
adds its adapters to a given output.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.command import run_command
from bench.lora_methods import (
    DTYPE,
    NONE,
    Adapters,
    Gathered,
    GivenOutput,
    Grouped,
    LoopOverRows,
    Method,
    Ours,
    PeftsWay,
)
from bench.plots import BENCHMARKS_PAGE, PLOTS, Panel, draw
from bench.report import Aim, Report, progress

AIMS = {
    "worst_over_best_other": Aim(at_most=1.1),
    "vs_gathered_64": Aim(at_least=1.5),
}
# Rank of the adapters, and their ranks in turn where a mix has several.
RANK, MIXED_RANKS = 16, (4, 8, 16, 32, 64)
_OTHERS: dict[str, Callable[[Adapters, Sequence[GivenOutput]], Method]] = {
    "loop over rows": LoopOverRows,
    "gathered": Gathered,
    "peft's way": PeftsWay,
    "grouped_mm": Grouped,
}
_OURS = "ours"
_DISTINCT = "distinct"
# Adapters of the rows, by the mix's name. The first `rows` adapters of a random order are distinct.
_MIXES: dict[str, Callable[[random.Random, list[int], int], list[int]]] = {
    _DISTINCT: lambda chance, order, rows: order[:rows],
    "uniform": lambda chance, order, rows: [chance.randrange(len(order)) for _ in range(rows)],
    # The published trace's skew: adapter floor(n * u ** (1 / alpha)), alpha 0.3.
    "skewed": lambda chance, order, rows: [int(len(order) * chance.random() ** (1 / 0.3)) for _ in range(rows)],
    "identical": lambda chance, order, rows: [order[0]] * rows,
    "ranks 4 to 64": lambda chance, order, rows: order[:rows],
    "half without": lambda chance, order, rows: [NONE] * (rows // 2) + order[: rows - rows // 2],
}
_MIXED = "ranks 4 to 64"
# Bytes written before each pass, so that no weight is still in the processor's cache.
_FLUSHED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Setup:
    """The sizes of a run. `layers` gives, by width, the number of a pass's layers, each with its own weights."""

    layers: dict[int, int]
    repeats: int
    adapters: int = 64
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    flushed_bytes: int = _FLUSHED_BYTES


FULL = Setup({896: 16, 4096: 4}, repeats=7)
QUICK = Setup({896: 4, 4096: 3}, repeats=2, batches=(1, 8, 64))


@dataclass(frozen=True)
class Point:
    """The microseconds that each method takes for one layer, at one width, mix and number of rows."""

    width: int
    mix: str
    rows: int
    us: dict[str, float]

    @property
    def over_best_other(self) -> float:
        """Return our time over the time of the best other method."""
        return self.us[_OURS] / min(self.us[name] for name in _OTHERS)


def main() -> None:
    """Run the benchmark with the command line's arguments; `--write-docs` writes its table and draws the plot."""
    run_command("lora_layer", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick), BENCHMARKS_PAGE)


def measure(setup: Setup, quick: bool) -> Report:
    """Measure all points and report them."""
    points = [point for width in setup.layers for point in _points(setup, width)]
    widest, most = max(setup.layers), max(setup.batches)
    hardest = next(point for point in points if (point.width, point.mix, point.rows) == (widest, _DISTINCT, most))
    return Report(
        name="lora_layer",
        command="python -m bench.lora_layer" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup) | {"rank": RANK, "mixed_ranks": MIXED_RANKS, "dtype": "bfloat16"},
        rows=[_row(point) for point in points],
        page_rows=[],
        ratios={
            "worst_over_best_other": max(point.over_best_other for point in points),
            "vs_gathered_64": hardest.us["gathered"] / hardest.us[_OURS],
        },
        aims=AIMS,
        draw=lambda: draw(_panels(points), PLOTS / "lora_layer.svg"),
    )


class _Layers:
    """Layers of one width with their adapters, and every method on these layers."""

    def __init__(self, setup: Setup, width: int, ranks: Sequence[int]) -> None:
        layers = setup.layers[width]
        adapters = Adapters([ranks[index % len(ranks)] for index in range(setup.adapters)], width, layers)
        self._bases = [GivenOutput(torch.empty(0)) for _ in range(layers)]
        makers = {**_OTHERS, _OURS: Ours}
        self._methods = {name: make(adapters, self._bases) for name, make in makers.items()}
        self._width = width
        self._repeats = setup.repeats
        self._flushed = torch.zeros(setup.flushed_bytes, dtype=torch.int8)

    def times(self, rows: list[int]) -> dict[str, float]:
        """Return each method's median microseconds a layer; the methods run in turn."""
        x = torch.randn(len(rows), self._width).to(DTYPE)
        for base in self._bases:
            base.y = torch.zeros(len(rows), self._width, dtype=DTYPE)
        taken: dict[str, list[float]] = {}
        # The first turn is a warm-up and dropped.
        for turn in range(self._repeats + 1):
            for name, method in self._methods.items():
                method.prepare(rows)
                us = self._pass_us(method, x)
                if turn:
                    taken.setdefault(name, []).append(us)
        return {name: median(us) for name, us in taken.items()}

    def _pass_us(self, method: Method, x: Tensor) -> float:
        """Return the microseconds a layer. The first layer is not timed: it loads the method's code into the cache."""
        self._flushed.add_(1)
        method.apply(0, x)
        start = time.perf_counter()
        for layer in range(1, len(self._bases)):
            method.apply(layer, x)
        return (time.perf_counter() - start) / (len(self._bases) - 1) * 1e6


@torch.inference_mode()
def _points(setup: Setup, width: int) -> list[Point]:
    points: list[Point] = []
    for ranks in ((RANK,), MIXED_RANKS):
        layers = _Layers(setup, width, ranks)
        for mix in (mix for mix in _MIXES if (mix == _MIXED) == (ranks is MIXED_RANKS)):
            mine = [Point(width, mix, rows, layers.times(_choose(mix, setup, rows))) for rows in setup.batches]
            points += mine
            worst = max(point.over_best_other for point in mine)
            progress(f"{width} wide, {mix}: ours takes at most {worst:.2f} of the best other")
    return points


def _choose(mix: str, setup: Setup, rows: int) -> list[int]:
    chance = random.Random(42)
    order = chance.sample(range(setup.adapters), setup.adapters)
    return sorted(_MIXES[mix](chance, order, rows))


def _row(point: Point) -> dict[str, Any]:
    return {
        "width": point.width,
        "rows' adapters": point.mix,
        "rows": point.rows,
        **{f"{name} us": us for name, us in point.us.items()},
        "ours over best other": point.over_best_other,
    }


def _panels(points: Sequence[Point]) -> list[Panel]:
    panels = []
    for width, mix in dict.fromkeys((point.width, point.mix) for point in points):
        mine = [point for point in points if (point.width, point.mix) == (width, mix)]
        lines = {name: [(point.rows, point.us[name]) for point in mine] for name in mine[0].us}
        panels.append(Panel(f"{width} wide, {mix}", "rows", "us a layer", lines))
    return panels


if __name__ == "__main__":
    main()
