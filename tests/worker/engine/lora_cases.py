"""Compares the kernels of LoRA with a loop over rows in float32, case by case: python lora_cases.py cpu|cuda.

Prints {dtype: {case: difference}} as JSON: the largest difference over the largest number expected, infinite where a
number is not finite or where a row without an adapter lost a bit. "alone" is how much a row's result depends on the
rest of the batch: 0 on CUDA, and left out on the CPU, where Triton's products are numpy's, whose bits depend on the
matrices' shapes and on the processor. "alone, exact" is the same of products that are exact in any order (see Numbers):
0 everywhere, unless the kernels add them up in another order. On the CPU the kernels need TRITON_INTERPRET=1, which
must be set before Triton is first imported, so this is a program of its own; and bfloat16 is wrong there.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraplex.worker.engine.lora.cuda import LOW_TILE, CudaLora
from loraplex.worker.engine.lora.cuda_experts import CudaExperts
from loraplex.worker.engine.lora.weights import AdapterWeights, LoraPair, Rescale
from tests.worker.engine.interpreted import interpret_quickly

Rows = tuple[tuple[int, int], ...]
# Modules that share their input, and one that stands alone.
GROUPS = {"qkv": ("q", "k", "v"), "o": ("o",)}
RANKS = (8, 16, 1, 5, 16, 12, 3, 16)
# Multiples of what one product of the shrink sums up, in features, and of the expand, in ranks.
EXACT_FEATURES, EXACT_RANKS = 128, 16


@dataclass(frozen=True)
class Case:
    """Rows (slot, tokens); where `padded` is set, as the step of one token a row that a graph holds.

    `ranks` are those of the slots, of which every third has a DoRA. Each adapter leaves out the module that stands at
    its slot's place in the group "qkv", the fourth none.
    """

    rows: Rows
    ranks: tuple[int, ...] = RANKS
    max_rank: int = 16
    features: int = 40
    widths: tuple[int, ...] = (36, 8, 24)
    padded: int = 0


def cases() -> Iterator[tuple[str, Case]]:
    """Every case with its name."""
    decodes = {
        "distinct": (0, 1, 2, 3, 4, 5, 6, 7),
        "uniform": (0, 0, 2, 2, 5, 5, 7, 7),
        "skewed": (0, 0, 0, 0, 0, 0, 1, 6),
        "identical": (3,) * 20,
        "some without": (-1, -1, -1, 0, 3, 3),
        "all without": (-1, -1, -1),
        "none": (),
    }
    for name, slots in decodes.items():
        yield f"{name}, padded", Case(tuple((slot, 1) for slot in slots), padded=24)
        yield name, Case(tuple((slot, 1) for slot in slots))
    yield "one row", Case(((2, 1),), padded=1)
    yield "chunks", Case(((-1, 3), (0, 15), (2, 16), (2, 2), (5, 1)))
    yield "long chunks", Case(((0, 1), (1, 1), (1, 1), (-1, 9), (1, 64), (3, 65), (3, 70), (7, 2)))
    mixed = Case(tuple((slot, 1) for slot in range(8)), (256, 1, 128, 33, 64, 2, 17, 255), 256)
    yield "ranks 1 to 256", mixed
    yield "ranks 1 to 256 of 300", replace(mixed, max_rank=300, rows=((-1, 1), (0, 20), (3, 1), (7, 18)))
    # Partial sums of 1,024 features, and longer ones where 16 of those are not enough.
    for features in (1023, 1024, 1025, 2500):
        yield f"{features} features", Case(((-1, 1), (1, 2), (6, 1)), features=features)
    yield "17000 features", Case(((-1, 1), (6, 2)), ranks=RANKS[:7], features=17_000)
    # Blocks of 512 columns, and of 128.
    for tokens in (1, 17):
        yield f"wide, {tokens} tokens", Case(((0, tokens), (3, tokens)), widths=(130, 513, 1024))
    yield "one module wide", Case(((0, 1), (3, 1)), widths=(3, 600, 1))


class Numbers:
    """A case's slots, inputs, and outputs of the base layers, in `dtype` on `device`.

    With `exact` each product of matrices in the kernels is exact in float32, in whatever order its terms are added: x
    and A are small integers, times a power of two for every EXACT_FEATURES of x, and B has one power of two among
    EXACT_RANKS. What is rounded is only what the kernels themselves add up, part after part.
    """

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype, *, exact: bool = False) -> None:
        self.case, self.device, self.dtype, self.exact = case, device, dtype, exact
        self._generator = torch.Generator().manual_seed(3)
        self.linears = dict(zip("qkv", ((case.features, width) for width in case.widths), strict=True))
        self.linears["o"] = (24, 40)
        self.lora = CudaLora(self.linears, GROUPS, len(case.ranks), case.max_rank, case.padded, dtype, device)
        for group in self.lora._groups.values():
            # Values outside of an adapter must not matter.
            group.a.fill_(math.nan)
            group.b.fill_(math.nan)
            group.rescales.gain.fill_(math.nan)
            group.rescales.shift.fill_(math.nan)
        self.held = [self._install(slot, rank) for slot, rank in enumerate(case.ranks)]
        tokens = max(case.padded, sum(tokens for _, tokens in case.rows))
        self.x = {name: self._x(tokens, self.linears[modules[0]][0]) for name, modules in GROUPS.items()}
        self.y = {
            name: self._normal(tokens, sum(self.linears[module][1] for module in modules))
            for name, modules in GROUPS.items()
        }

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.dtype)

    def _integers(self, limit: int, *shape: int) -> Tensor:
        """Integers from -limit to limit."""
        return torch.randint(-limit, limit + 1, shape, generator=self._generator).to(self.device, self.dtype)

    def _x(self, tokens: int, features: int) -> Tensor:
        """Inputs [tokens, features]."""
        if not self.exact:
            return self._normal(tokens, features)
        exponents = -9 * (torch.arange(features, device=self.device) // EXACT_FEATURES % 3)
        return self._integers(8, tokens, features) * (2.0**exponents).to(self.dtype)

    def _pair(self, rank: int, inputs: int, width: int) -> tuple[Tensor, Tensor]:
        """A [rank, inputs] and B [rank, width]."""
        if not self.exact:
            return self._normal(rank, inputs) / inputs**0.5, self._normal(rank, width) / rank**0.5
        b = torch.zeros(rank, width, dtype=self.dtype, device=self.device)
        for first in range(0, rank, EXACT_RANKS):
            chosen = torch.randint(first, min(first + EXACT_RANKS, rank), (width,), generator=self._generator)
            b[chosen.to(self.device), torch.arange(width, device=self.device)] = 2.0 ** (first // EXACT_RANKS - 3)
        return self._integers(8, rank, inputs), b

    def _install(self, slot: int, rank: int) -> AdapterWeights:
        left_out = "qkv-"[slot % 4]
        pairs = {
            module: LoraPair(
                *self._pair(rank, inputs, width),
                Rescale(*self._normal(2, width)) if slot % 3 == 1 else None,
            )
            for module, (inputs, width) in self.linears.items()
            if module != left_out
        }
        weights = AdapterWeights(pairs, rank)
        self.lora.install(weights, slot)
        return weights

    def by_kernels(self, name: str, rows: Rows, x: Tensor, y: Tensor) -> Tensor:
        """The group's output [tokens, width] with the rows' adapters."""
        if self.case.padded:
            self.lora.begin_decode([slot for slot, _ in rows], self.case.padded)
        else:
            self.lora.begin_step(rows)
        out = y.clone()
        self.lora.apply(x[None], out[None], name)
        return out

    def by_loop(self, name: str) -> Tensor:
        """Compute the group's output row by row, in float32 on the CPU."""
        slots = [slot for slot, tokens in self.case.rows for _ in range(tokens)]
        out = self.y[name].float().cpu()
        for row, slot in enumerate(slots):
            at = 0
            for module in GROUPS[name]:
                width = self.linears[module][1]
                pair = self.held[slot].pairs.get(module) if slot >= 0 else None
                if pair is not None:
                    a, b = pair.a.float().cpu(), pair.b.float().cpu()
                    if pair.rescale is not None:
                        gain, shift = pair.rescale.gain.float().cpu(), pair.rescale.shift.float().cpu()
                        out[row, at : at + width] += out[row, at : at + width] * gain + shift
                    out[row, at : at + width] += self.x[name][row].float().cpu() @ a.t() @ b
                at += width
        return out


def difference(case: Case, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference of any group's output."""
    numbers = Numbers(case, device, dtype)
    slots = [slot for slot, tokens in case.rows for _ in range(tokens)]
    without = [row for row in range(len(numbers.x["o"])) if row >= len(slots) or slots[row] < 0]
    worst = 0.0
    for name in GROUPS:
        out, expected = numbers.by_kernels(name, case.rows, numbers.x[name], numbers.y[name]), numbers.by_loop(name)
        if not torch.equal(out[without], numbers.y[name][without]):
            return math.inf
        if len(out):
            apart = (out.float().cpu() - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(apart.nan_to_num(math.inf)))
    return worst


def difference_alone(device: torch.device, dtype: torch.dtype, *, exact: bool) -> float:
    """Return how a row's result changes with the batch: beside rows of its adapter, in a chunk, alone.

    That is the largest difference over the largest number.
    """
    # Two partial sums, of which the second is short; interpreting takes its time.
    features = 2500 if device.type == "cuda" else 1040
    case = Case(((0, 1), (4, 70), (6, 3)), (8, 16, 1, 5, 40, 12, 3, 16), max_rank=40, features=features)
    numbers = Numbers(case, device, dtype, exact=exact)
    worst = 0.0
    for name in GROUPS:
        x, y = numbers.x[name], numbers.y[name]
        together = numbers.by_kernels(name, numbers.case.rows, x, y)
        for row, slot in ((0, 0), (9, 4), (70, 4), (73, 6)):
            alone = numbers.by_kernels(name, ((slot, 1),), x[row : row + 1], y[row : row + 1])
            assert not torch.equal(alone[0], y[row]), "the adapter changes nothing"
            apart = (alone[0] - together[row]).abs().max() / together.abs().max()
            worst = max(worst, float(apart.nan_to_num(math.inf)))
    return worst


def difference_swapped(device: torch.device, dtype: torch.dtype) -> float:
    """An adapter of a smaller rank, on fewer modules, in place of a larger one: 0 where nothing of that is left."""
    numbers = Numbers(Case(((4, 3),)), device, dtype, exact=True)
    numbers.held[4] = AdapterWeights({"q": LoraPair(torch.ones(2, 40), torch.ones(2, 36))}, 2)
    fresh = Numbers(numbers.case, device, dtype, exact=True)
    fresh.lora.warm_up()
    for held in (numbers, fresh):
        held.lora.install(numbers.held[4], 4)
    fresh.lora._groups["qkv"].a[4, 0, 2:].fill_(random.Random(1).random())
    out = [one.by_kernels("qkv", one.case.rows, numbers.x["qkv"], numbers.y["qkv"]) for one in (numbers, fresh)]
    changed = (out[0] != numbers.y["qkv"]).any(0)
    return 0.0 if torch.equal(*out) and changed[:36].all() and not changed[36:].any() else math.inf


def difference_of_tiles(device: torch.device) -> float:
    """Return 0 where tiles of sorted pairs hold each pair with an adapter once, in the slot of it and its expert."""
    slots, experts = 3, 5
    lora = CudaLora({"o": (24, 40)}, {"o": ("o",)}, slots, 4, 1, torch.float32, device)
    adapters = CudaExperts(lora, {}, slots, 4, 1, torch.float32, device)
    # Runs of one pair and of several tiles, of which some begin at the first row of a tile.
    keys = torch.randint(0, experts * (slots + 1), (300,), generator=torch.Generator().manual_seed(5))
    keys = torch.where(keys % 3 > 0, 6, keys).sort().values.to(device)
    call = adapters.tiles_call(keys, experts)
    call.launch()
    held = torch.full((300,), -1)
    for slot, first, rows in call.arguments["table"].tolist():
        if slot >= 0:
            part = held[first : first + rows]
            if not 0 < len(part) <= LOW_TILE or (part >= 0).any():
                return math.inf
            part[:] = slot
    slot_of, expert = keys.cpu() % (slots + 1) - 1, keys.cpu() // (slots + 1)
    return 0.0 if torch.equal(held, torch.where(slot_of >= 0, slot_of * experts + expert, -1)) else math.inf


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = torch.device(sys.argv[1])
    cuda = place.type == "cuda"
    if not cuda:
        interpret_quickly()
    # Of so many cases one: float32 says most, and interpreting takes its time.
    chosen = {"float32": 1, "float16": 1, "bfloat16": 1} if cuda else {"float32": 3, "float16": 9}
    # Where products are numpy's, "alone" says nothing that "alone, exact" does not say better.
    ways = {"alone": False, "alone, exact": True} if cuda else {"alone, exact": True}
    results = {}
    for name, every in chosen.items():
        dtype = getattr(torch, name)
        results[name] = {case: difference(value, place, dtype) for case, value in list(cases())[::every]}
        if cuda or name == "float32":
            results[name] |= {way: difference_alone(place, dtype, exact=exact) for way, exact in ways.items()}
            results[name] |= {"swapped": difference_swapped(place, dtype), "tiles": difference_of_tiles(place)}
    print(json.dumps(results))
