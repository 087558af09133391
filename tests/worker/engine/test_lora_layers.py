"""LoRA layers against a plain loop over rows in float32, over every kind of mix."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from loraplex.worker.engine.lora.base_layers import FusedProduct, fuse, place_parts
from loraplex.worker.engine.lora.cpu import CpuLayers
from loraplex.worker.engine.lora.weights import AdapterWeights, LoraPair, Rescale

pytestmark = pytest.mark.usefixtures("one_thread")

SLOTS, MAX_RANK = 12, 16
LINEARS = {"first": (24, 40), "inner.second": (40, 8)}


class Inner(nn.Module):
    """A layer below the top."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(40, 8, bias=False)


class Pipe(nn.Module):
    """Two linear layers, one of them nested."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner.second(torch.relu(self.first(x)))
        return out


class Checked:
    """The layers, and beside them what each slot should do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.pipe = Pipe().requires_grad_(False)
        self.base = [self.pipe.first, self.pipe.inner.second]
        self.layers = CpuLayers(self.pipe, LINEARS, SLOTS, MAX_RANK, torch.float32)
        self.held: dict[int, AdapterWeights] = {}

    def install(self, slot: int, ranks: dict[str, int], scale: float = 0.3, *, dora: bool = False) -> None:
        pairs = {
            name: LoraPair(
                torch.randn(rank, LINEARS[name][0]) * scale,
                torch.randn(rank, LINEARS[name][1]) * scale,
                Rescale(*torch.randn(2, LINEARS[name][1])) if dora else None,
            )
            for name, rank in ranks.items()
        }
        weights = AdapterWeights(pairs, max(ranks.values()))
        self.layers.install(weights, slot)
        self.held[slot] = weights

    def check(self, decodes: list[int], chunks: list[tuple[int, int]] = []) -> None:  # noqa: B006 - not changed
        """Run a step of decode rows by slot and (slot, tokens) chunks; compare every row."""
        rows = [(slot, 1) for slot in sorted(decodes)] + sorted(chunks)
        slots = [slot for slot, tokens in rows for _ in range(tokens)]
        x = torch.randn(1, len(slots), 24)
        self.layers.begin_step(rows)
        out = self.pipe(x)[0]
        for row, slot in enumerate(slots):
            torch.testing.assert_close(out[row], self._alone(x[0, row], slot), rtol=1e-5, atol=1e-5)

    def _alone(self, x: Tensor, slot: int) -> Tensor:
        pairs = self.held[slot].pairs if slot >= 0 else {}
        for name, base in zip(LINEARS, self.base, strict=True):
            y = base(x)
            if name in pairs:
                change = pairs[name].rescale
                if change is not None:
                    y = y + y * change.gain + change.shift
                y = y + x @ pairs[name].a.t() @ pairs[name].b
            x = torch.relu(y) if name == "first" else y
        return x


@pytest.fixture
def checked() -> Checked:
    checked = Checked()
    for slot in range(SLOTS):
        checked.install(slot, {"first": [16, 8, 3, 1][slot % 4], "inner.second": [2, 16, 5, 16][slot % 4]})
    # Adapters that change one of the two layers only.
    checked.install(3, {"first": 4})
    checked.install(5, {"inner.second": 9})
    checked.install(8, {"first": 8, "inner.second": 8}, dora=True)
    checked.install(9, {"inner.second": 2}, dora=True)
    return checked


MIXES: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "all base": ([-1, -1, -1], [(-1, 5)]),
    "identical": ([4, 4, 4, 4], []),
    "two adapters": ([4, 4, 7, 7], []),
    "distinct, ranks mixed": ([0, 1, 2, 4, 6, 7, 8], []),
    "some none": ([-1, -1, 0, 2, 2, 3, 9], []),
    "one layer each": ([3, 5, 3, 5, -1, 0], []),
    "only other layers": ([3, 3, -1, 7], []),
    "DoRA": ([-1, 0, 8, 8, 9], [(-1, 2), (8, 3), (9, 4), (10, 2)]),
    "chunks": ([], [(-1, 3), (0, 4), (2, 7), (2, 2), (5, 1)]),
    "decodes and chunks": ([-1, 0, 1, 2, 3], [(-1, 6), (1, 4), (11, 9)]),
}


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_is_what_the_rows_are_alone(checked: Checked, mix: str) -> None:
    decodes, chunks = MIXES[mix]
    checked.check(decodes, chunks)


@pytest.mark.parametrize("seed", range(4))
def test_walk_over_steps_and_installs(seed: int) -> None:
    chance = random.Random(seed)
    checked, population = Checked(), [-1]
    for _ in range(250):
        if len(checked.held) < 3 or chance.random() < 0.06:
            names = chance.choice([["first"], ["inner.second"], ["first", "inner.second"]])
            ranks = {name: chance.randint(1, MAX_RANK) for name in names}
            checked.install(chance.randrange(SLOTS), ranks, dora=chance.random() < 0.3)
        if len(population) < 2 or chance.random() < 0.15:
            population = chance.sample([-1, *checked.held], min(len(checked.held), chance.choice([1, 3, 5, 9])))
        decodes = [chance.choice(population) for _ in range(chance.randint(0, 10))]
        chunks = [(chance.choice(population), chance.randint(2, 6)) for _ in range(chance.randint(0, 3))]
        if decodes or chunks:
            checked.check(decodes, chunks)


def test_rows_without_an_adapter_keep_the_base_layers_bits(checked: Checked) -> None:
    x = torch.randn(1, 6, 24)
    expected = checked.base[1](torch.relu(checked.base[0](x)))
    checked.layers.begin_step([(-1, 1), (-1, 1), (0, 1), (1, 1), (2, 1), (8, 1)])
    assert torch.equal(checked.pipe(x)[0, :2], expected[0, :2])


def test_another_rows_adapter_that_overflows_is_not_felt(checked: Checked) -> None:
    checked.install(6, {"first": 16, "inner.second": 16}, scale=1e18)
    x = torch.randn(1, 5, 24)
    checked.layers.begin_step([(slot, 1) for slot in (-1, 0, 1, 2, 6)])
    out = checked.pipe(x)[0]
    assert not out[4].isfinite().all()
    for row, slot in enumerate((-1, 0, 1, 2)):
        torch.testing.assert_close(out[row], checked._alone(x[0, row], slot), rtol=1e-5, atol=1e-5)


class ThreeLinears(nn.Module):
    """Three layers with one input, called as models call them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(24, 40), nn.Linear(24, 8), nn.Linear(24, 8)
        self.lm_head = nn.Linear(56, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lm_head(
            torch.cat([layer(x) for layer in (self.q_proj, self.k_proj, self.v_proj)], -1)[:, ::2]
        )
        return out


@pytest.mark.parametrize("fused", [False, True])
def test_fused_linears_are_one_group_once_they_are_one_product(fused: bool) -> None:
    torch.manual_seed(0)
    model, plain = ThreeLinears().requires_grad_(False), ThreeLinears().requires_grad_(False)
    plain.load_state_dict(model.state_dict())
    linears = {"q_proj": (24, 40), "k_proj": (24, 8), "v_proj": (24, 8)}
    if fused:
        place_parts(model, list(linears), FusedProduct(fuse([model.q_proj, model.k_proj, model.v_proj]), [40, 8, 8]))
    ends = {"lm_head": (56, 10)}
    layers = CpuLayers(model, linears, 2, 8, torch.float32, ends)
    assert len(layers._groups) == (2 if fused else 4)
    pairs = {
        name: LoraPair(torch.randn(3, shape[0]), torch.randn(3, shape[1])) for name, shape in (linears | ends).items()
    }
    layers.install(AdapterWeights(pairs, 3), 1)
    # The head sees every other row: those with logits.
    layers.begin_step([(-1, 1), (-1, 1), (1, 1), (1, 1)], [1, 0, 1, 0])
    x = torch.randn(1, 4, 24)
    result, expected = model(x)[0], plain(x)[0]
    assert torch.equal(result[0], expected[0]) or fused
    torch.testing.assert_close(result[0], expected[0], rtol=1e-5, atol=1e-5)
    for name, weight in plain.named_parameters():
        if name.endswith(".weight"):
            pair = pairs[name.removesuffix(".weight")]
            weight.add_(pair.b.t() @ pair.a)
    torch.testing.assert_close(result[1], plain(x)[0][1], rtol=1e-4, atol=1e-4)


# No engine of the CPU is in float16, of which a kernel is compiled here.
@pytest.mark.nightly
def test_a_float16_column_that_overflows_is_not_felt() -> None:
    layers = CpuLayers(pipe := Pipe().half().requires_grad_(False), LINEARS, 2, 8, torch.float16)
    for slot, scale in ((0, 6e4), (1, 0.1)):
        pair = LoraPair(torch.full((8, 24), scale).half(), torch.full((8, 40), 0.1).half())
        layers.install(AdapterWeights({"first": pair}, 8), slot)
    x = torch.ones(1, 2, 24).half()
    layers.begin_step([(0, 1), (1, 1)])
    out = pipe(x)[0]
    assert not out[0].isfinite().all()
    assert out[1].isfinite().all()
