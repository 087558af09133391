"""The CPU's attention kernel against attention in torch: every case of the other kernels' tests, in three dtypes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from numba import cfunc
from torch import Tensor

from loraplex.kernels.rows import compile_rows
from loraplex.kernels.weight_vectors import EMULATED, V
from loraplex.worker.engine.attention.cpu import CpuPlan, cpu_plan
from loraplex.worker.engine.attention.paged import row_blocks
from loraplex.worker.engine.scheduling.batch import Batch
from tests.worker.engine.attention_batches import CPU, Case, Numbers, cases

pytestmark = pytest.mark.usefixtures("two_threads")

# The kernel is compiled for each number of heads and each width, for seconds, so each of these shapes shows several:
# keys of sixteens alone, values of sixteens and an eight; keys of an eight and a four, values of a four and a two, as
# latent attention of the other tests has. All others have eights alone, as many families there have.
EIGHTS: dict[str, Any] = {"dim": 8, "value_dim": 8}
LATENT: dict[str, Any] = {"dim": 12, "value_dim": 6}
SHAPES = {
    "values narrower than keys": {"dim": 80, "value_dim": 24},
    "7 heads, 1 for keys": LATENT,
    "14 heads, 2 for keys": LATENT,
}
# The kernel has no code of its own for these: widths as above, and several query heads for one of keys as with 7.
LIKE_OTHERS = {"dim 24", "dim 64", "dim 80", "6 heads, 1 for keys", "20 heads, 1 for keys", "chunk edges, 4 heads"}
CASES = {name: replace(case, **SHAPES.get(name, EIGHTS)) for name, case in cases() if name not in LIKE_OTHERS}
# Maximum error relative to the largest output, of float32 sums of up to 80 products in a score: kernel and oracle add
# in different orders, and the oracle's is the processor's. Measured: 6 eps.
TOLERANCE = 80 * torch.finfo(torch.float32).eps
# Maximum error relative to an output, of its rounding: that of queries, keys and values is in the oracle too.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}


_WITH_TILES = pytest.mark.skipif(V != 16, reason="tiles have panels of 32 positions")


def by_kernel(numbers: Numbers, batch: Batch | None = None) -> Tensor:
    batch = batch or numbers.batch
    rows = row_blocks(batch.rows, numbers.cache.block_size)
    return cpu_plan(rows, numbers.cache).attend(numbers.call(batch.tokens), numbers.cache).float()


def check(numbers: Numbers) -> None:
    expected = numbers.in_torch()
    atol = TOLERANCE * float(expected.abs().max())
    torch.testing.assert_close(by_kernel(numbers), expected, rtol=ROUNDING[numbers.dtype], atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_what_torch_makes_of_it(name: str) -> None:
    check(Numbers(CASES[name], CPU, torch.float32))


# No engine of the CPU is in float16.
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)])
def test_halves_are_rounded_once(dtype: torch.dtype) -> None:
    # Vectors of 16 numbers and of 8: one shape, because each is compiled anew.
    case = replace(CASES["window 5, softcap 1.5, sinks True"], heads=4, kv_heads=2, dim=24, value_dim=24)
    check(Numbers(case, CPU, dtype))


@pytest.mark.parametrize(
    "products",
    [
        "fastest",
        pytest.param("tiles", marks=_WITH_TILES),
        pytest.param("int8", marks=[_WITH_TILES, pytest.mark.nightly]),
    ],
)
def test_company_changes_no_bit(products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone a row is shared out by its heads, in company it is one task; a chunk's tokens are computed together."""
    case = Case(dim=24, value_dim=24, decodes=(300, 5, 12, 70, 71), chunks=((40, 5), (90, 60)), window=200)
    if products != "fastest":
        # The code for AMX, over tiles in memory. Values of more positions than are packed together, in two panels.
        monkeypatch.setattr("loraplex.worker.engine.attention.cpu.fastest_products", lambda *_: EMULATED)
        case = replace(case, dim=64, value_dim=64, int8=products == "int8")
        numbers = Numbers(case, CPU, torch.bfloat16)
        expected = numbers.in_torch()
        # A weight is rounded to bfloat16; weights add up to 1.
        atol = 2**-9 * float(numbers.exact.slots[0][1].abs().max())
        torch.testing.assert_close(by_kernel(numbers), expected, rtol=ROUNDING[torch.bfloat16], atol=atol)
    numbers = Numbers(case, CPU, torch.bfloat16)
    together = by_kernel(numbers)
    alone = by_kernel(numbers, Batch(numbers.batch.rows[:1], 1, 1))
    assert torch.equal(alone, together[:1])
    tokens = [replace(row, start=row.start + at, count=1) for row in numbers.batch.rows for at in range(row.count)]
    assert torch.equal(by_kernel(numbers, Batch(tuple(tokens), len(tokens), len(tokens))), together)


def test_large_scores_do_not_overflow() -> None:
    numbers = Numbers(Case(**EIGHTS, chunks=()), CPU, torch.float32)
    numbers.query *= 1e4
    result = by_kernel(numbers)
    assert result.isfinite().all()
    torch.testing.assert_close(result, numbers.in_torch(), rtol=1e-5, atol=1e-5)


def test_a_torch_without_openmp_computes_the_same_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers(Case(**EIGHTS, chunks=((0, 9),)), CPU, torch.float32)
    expected = by_kernel(numbers)
    monkeypatch.setattr("loraplex.kernels.threads._parallel", lambda: None)
    assert torch.equal(by_kernel(numbers), expected)


def test_every_thread_takes_part_and_every_task_is_done_once() -> None:
    numbers = Numbers(Case(**EIGHTS, decodes=tuple(range(200, 264)), chunks=()), CPU, torch.float32)
    plan: CpuPlan = cpu_plan(row_blocks(numbers.batch.rows, numbers.cache.block_size), numbers.cache)
    plan.attend(numbers.call(numbers.batch.tokens), numbers.cache)
    taken, threads = numbers.cache.counters.tolist()
    assert threads == 2
    assert taken == len(plan.tasks_of(2).lines) + threads, "each thread looks once more and finds nothing"


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(signature: object, cache: bool = False) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return cfunc(signature)

    monkeypatch.setattr("loraplex.kernels.compilation.cfunc", nowhere)
    assert compile_rows.__wrapped__("add", "float32").address
