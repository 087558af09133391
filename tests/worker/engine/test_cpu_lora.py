"""The CPU's LoRA kernel against a float32 loop over rows: three dtypes, ranks to 256, whatever the threads."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from loraplex.kernels.tiles import can_use_tiles
from loraplex.kernels.weight_vectors import EMULATED, TILES, V
from loraplex.worker.engine.lora.cpu import CpuGroup, CpuStep
from loraplex.worker.engine.lora.weights import LoraPair, Rescale

pytestmark = pytest.mark.usefixtures("two_threads")

SLOTS, MAX_RANK = 6, 256
# Layers side by side: no width is a multiple of the vectors'; the last is more than a block, also in parts.
IN_FEATURES, WIDTHS = 150, (67, 33, 2310)
# For tiles all sizes are multiples of 32; more columns than are packed together.
TILE_SIZES = 544, (64, 32, 2304)
# Relative to outputs of about 1: rounded once at the end, whatever stands between.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
DTYPES = torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)


class Group:
    """A group whose base gives numbers that are there already, and the pairs in its slots."""

    def __init__(
        self,
        dtype: torch.dtype,
        ranks: Sequence[Sequence[int]],
        *,
        dora: bool = False,
        sizes: tuple[int, Sequence[int]] = (IN_FEATURES, WIDTHS),
    ) -> None:
        """`ranks` by slot and layer, 0 for layers that the adapter does not change."""
        self.in_features, self.widths = sizes
        self.chance = torch.Generator().manual_seed(0)
        self.dtype = dtype
        self.step = CpuStep()
        self.y = torch.empty(0)
        self.group = CpuGroup(
            lambda _: self.y.clone(), self.in_features, self.widths, SLOTS, MAX_RANK, dtype, self.step
        )
        self.pairs = [
            [self.pair(rank, width, dora) for rank, width in zip(of, self.widths, strict=True)] for of in ranks
        ]
        for slot, pairs in enumerate(self.pairs):
            self.group.set_slot(slot, pairs)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.chance)

    def pair(self, rank: int, width: int, dora: bool) -> LoraPair | None:
        if not rank:
            return None
        a, b = self.random(rank, self.in_features) / self.in_features**0.5, self.random(rank, width) / (4 * rank**0.5)
        change = Rescale(*(self.random(2, width) / 4).to(self.dtype)) if dora else None
        return LoraPair(a.to(self.dtype), b.to(self.dtype), change)

    def result(self, slots: Sequence[int], x: Tensor, y: Tensor, prompt: tuple[int, int] | None = None) -> Tensor:
        """Of one row for each slot, and behind them a prompt's (slot, rows)."""
        self.y = y
        self.step.set_rows([(slot, 1) for slot in slots] + ([prompt] if prompt else []))
        return self.group.compute(x)

    def expected(self, slots: Sequence[int], x: Tensor, y: Tensor) -> Tensor:
        """In float32, row by row."""
        out = y.float()
        for row, slot in enumerate(slots):
            first = 0
            for width, pair in zip(
                self.widths, self.pairs[slot] if slot >= 0 else [None] * len(self.widths), strict=True
            ):
                part = slice(first, first := first + width)
                if pair is None:
                    continue
                own = out[row, part].clone()
                if pair.rescale is not None:
                    out[row, part] += own * pair.rescale.gain.float() + pair.rescale.shift.float()
                out[row, part] += x[row].float() @ pair.a.float().t() @ pair.b.float()
        return out

    def inputs(self, rows: int) -> tuple[Tensor, Tensor]:
        return self.random(rows, self.in_features).to(self.dtype), self.random(rows, sum(self.widths)).to(self.dtype)

    def check(self, slots: Sequence[int], roundings: int = 1) -> None:
        x, y = self.inputs(len(slots))
        result, expected = self.result(slots, x, y).float(), self.expected(slots, x, y)
        largest = expected.abs().amax(1, keepdim=True).clamp(min=1)
        assert ((result - expected).abs() <= roundings * TOLERANCE[self.dtype] * largest).all()
        assert not torch.equal(result, y.float()), "something was added"


RANKS = [(16, 16, 16), (1, 5, 2), (0, 256, 3), (8, 0, 0), (64, 7, 30), (0, 0, 0)]
MIXES = {
    "one": [0],
    "distinct": [-1, 0, 1, 2, 3, 4, 5],
    "identical": [4] * 4,
    "five of one, seven of another": [1] * 5 + [2] * 7,
    "a prompt in pieces": [0] * 300 + [2] * 97 + [4] * 3,
    "none between": [-1, -1, 0, 0, 0, 5, 5],
}


@pytest.mark.parametrize("dora", [False, True], ids=["plain", "DoRA"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_gets_what_its_adapter_makes_of_it(dtype: torch.dtype, dora: bool) -> None:
    group = Group(dtype, RANKS, dora=dora)
    for slots in MIXES.values():
        group.check(slots)


def test_a_row_without_an_adapter_keeps_its_bits() -> None:
    group = Group(torch.bfloat16, RANKS)
    x, y = group.inputs(4)
    result = group.result([-1, 0, 3, 5], x, y)
    assert torch.equal(result[[0, 3]], y[[0, 3]])
    assert torch.equal(result[2, WIDTHS[0] :], y[2, WIDTHS[0] :]), "layers that the adapter does not change"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_company_changes_no_bit(dtype: torch.dtype) -> None:
    """Neither that of other adapters' rows nor that of its own adapter's, nor how a task is cut into parts."""
    group = Group(dtype, RANKS)
    x, y = group.inputs(9)
    together = group.result([0, 0, 0, 0, 0, 1, 2, 3, 4], x, y)
    for row, slot in ((0, 0), (3, 0), (4, 0), (6, 2), (8, 4)):
        assert torch.equal(group.result([slot], x[row : row + 1], y[row : row + 1])[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_prompt_s_rows_have_the_bits_of_decodes(dtype: torch.dtype) -> None:
    group = Group(dtype, RANKS)
    x, y = group.inputs(302)
    together = group.result([0, 4], x, y, prompt=(4, 300))
    assert [stop - first for _, first, stop in group.step.segments] == [1, 128, 128, 45]
    for row, slot in ((0, 0), (1, 4), (2, 4), (129, 4), (301, 4)):
        assert torch.equal(group.result([slot], x[row : row + 1], y[row : row + 1])[0], together[row])


WITH_TILES = pytest.mark.skipif(V != 16, reason="panels of tiles have 32 outputs")
WITH_AMX = pytest.mark.skipif(not can_use_tiles(), reason="the processor has no AMX")
PRODUCTS = [
    pytest.param(EMULATED, marks=WITH_TILES, id="tiles in memory"),
    pytest.param(TILES, marks=WITH_AMX, id="AMX"),
]


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["plain", "DoRA"])
def test_tiles_give_few_rows_and_many_the_same_bits(products: int, dora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.worker.engine.lora.cpu.fastest_products", lambda *_: products)
    group = Group(torch.bfloat16, RANKS, dora=dora, sizes=TILE_SIZES)
    for slots in MIXES.values():
        # Maximum error of two roundings: products with A are rounded before those with B, sums at the end.
        group.check(slots, roundings=2)
    x, y = group.inputs(147)
    slots = [0] * 5 + [1] * 9 + [3] * 3 + [4] * 130
    together = group.result(slots, x, y)
    for row in (0, 4, 5, 13, 14, 16, 17, 146):
        assert torch.equal(group.result([slots[row]], x[row : row + 1], y[row : row + 1])[0], together[row])


@pytest.mark.parametrize("given", ["another number of rows", "another dtype"])
def test_what_is_not_the_steps_is_refused_and_not_written_over(given: str) -> None:
    group = Group(torch.float32, RANKS)
    x, y = group.inputs(3)
    x, y = (x[:2], y[:2]) if given == "another number of rows" else (x.half(), y.half())
    with pytest.raises(AssertionError):
        group.result([0, 1, 2], x, y)


def test_a_torch_without_openmp_computes_the_same_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(torch.float32, RANKS)
    x, y = group.inputs(3)
    expected = group.result([0, 1, 2], x, y)
    monkeypatch.setattr("loraplex.kernels.threads._parallel", lambda: None)
    assert torch.equal(group.result([0, 1, 2], x, y), expected)


def test_every_thread_takes_part_and_every_task_is_done_once() -> None:
    group = Group(torch.float32, RANKS)
    group.check([0, 1, 2, 3, 4])
    tasks = 5 * len(WIDTHS) * group.step.parts
    assert group.step.counters.tolist() == [tasks + 2, tasks, tasks + 2, 2], "each thread looks once more, twice"


def test_an_adapter_is_neither_copied_nor_kept_for_longer_than_its_slot() -> None:
    group = Group(torch.float32, [])
    pair = LoraPair(torch.ones(1, IN_FEATURES), torch.ones(1, WIDTHS[0]))
    group.group.set_slot(2, [pair, None, None])
    x, y = group.inputs(1)
    before = group.result([2], x, y)
    pair.b.mul_(2)
    assert not torch.equal(group.result([2], x, y), before), "it is read where it lies"
    alive = weakref.ref(pair.a)
    del pair
    gc.collect()
    assert alive() is not None
    group.group.set_slot(2, [None, None, None])
    gc.collect()
    assert alive() is None
    assert torch.equal(group.result([2], x, y), y)
