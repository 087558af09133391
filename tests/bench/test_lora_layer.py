"""bench.lora_layer: every method gives what a plain loop in float32 gives."""

from __future__ import annotations

import pytest
import torch

from bench.lora_layer import FULL
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


def test_the_points_are_those_that_are_asked_for() -> None:
    assert (min(FULL.batches), max(FULL.batches), FULL.adapters, set(FULL.layers)) == (1, 64, 64, {896, 4096})
