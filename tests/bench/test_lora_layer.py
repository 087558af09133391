"""bench.lora_layer: every method gives what a plain loop in float32 gives, and the report is complete. No times."""

from __future__ import annotations

import math

import pytest
import torch

from bench.lora_layer import AIMS, FULL, Setup, measure
from bench.lora_methods import (
    DTYPE,
    NONE,
    Adapters,
    Gathered,
    GivenOutput,
    Grouped,
    LoopOverRows,
    Ours,
    PeftsWay,
    rows_by_loop,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [NONE, NONE, 0, 1, 1, 3, 4, 4, 4, 7]


@pytest.mark.parametrize("method", [LoopOverRows, Gathered, PeftsWay, Grouped, Ours])
@pytest.mark.parametrize("ranks", [(8,) * 8, (4, 8, 16, 32, 64, 4, 8, 16)], ids=["one rank", "mixed ranks"])
@torch.inference_mode()
def test_every_method_does_the_same(
    method: type[LoopOverRows | Gathered | PeftsWay | Grouped | Ours], ranks: tuple[int, ...]
) -> None:
    adapters = Adapters(ranks, 96, layers=2)
    torch.manual_seed(1)
    x, y = torch.randn(len(ROWS), 96).to(DTYPE), torch.randn(2, len(ROWS), 96).to(DTYPE)
    bases = [GivenOutput(one.clone()) for one in y]
    way = method(adapters, bases)
    way.prepare(ROWS)
    for layer, base in enumerate(y):
        expected = rows_by_loop(adapters, ROWS, layer, x, base)
        assert (expected - base.float()).abs().max() > 0.02, "the adapters change nothing"
        torch.testing.assert_close(way.apply(layer, x).float(), expected, rtol=0.02, atol=0.02)
        assert torch.equal(way.apply(layer, x)[:2], base[:2])


def test_every_point_and_ratio_is_there() -> None:
    setup = Setup({32: 2, 64: 2}, repeats=1, adapters=8, batches=(1, 8), flushed_bytes=64)
    report = measure(setup, quick=True)
    report.show()
    written = report.to_json()
    assert len(written["rows"]) == 2 * 6 * 2
    assert {row["rows' adapters"] for row in written["rows"]} == {
        "distinct", "uniform", "skewed", "identical", "ranks 4 to 64", "half without"
    }  # fmt: skip
    for row in written["rows"]:
        times = [value for key, value in row.items() if key.endswith(" us")]
        assert len(times) == 5
        assert all(0 < value < math.inf for value in times)
    assert written["ratios"].keys() == written["aims"].keys() == AIMS.keys()
    assert all(math.isfinite(value) and value > 0 for value in written["ratios"].values())


def test_the_points_are_those_that_are_asked_for() -> None:
    assert (min(FULL.batches), max(FULL.batches), FULL.adapters, set(FULL.layers)) == (1, 64, 64, {896, 4096})
