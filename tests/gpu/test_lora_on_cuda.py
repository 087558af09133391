"""The kernels of LoRA on the device: against a loop over rows on the CPU, and inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from loraplex.worker.engine.lora.weights import AdapterWeights, LoraPair
from tests.worker.engine.triton_runs import results_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

# Of the largest number expected; the sums between the two products are rounded to the adapter's type.
TOLERANCES = {"float32": 5e-6, "float16": 4e-3, "bfloat16": 3e-2}
ROWS, SLOTS, FEATURES, WIDTHS = 12, 6, 1500, {"q": 96, "k": 40, "v": 300}


def test_kernels_compute_what_a_loop_computes() -> None:
    [differences] = results_of(["lora_cases.py"], "cuda")
    for name, tolerance in TOLERANCES.items():
        exact = ("alone", "alone, exact", "swapped", "tiles")
        assert [differences[name].pop(case) for case in exact] == [0, 0, 0, 0]
        assert len(differences[name]) == 27
        assert {case: value for case, value in differences[name].items() if value > tolerance} == {}, name


def test_one_graph_serves_every_mix_and_every_adapter_that_comes_later() -> None:
    from loraplex.worker.engine.lora.cuda import CudaLora

    cuda = torch.device("cuda")
    torch.manual_seed(1)
    linears = {name: (FEATURES, width) for name, width in WIDTHS.items()}
    lora = CudaLora(linears, {"qkv": tuple(linears)}, SLOTS, 32, ROWS, torch.float32, cuda)
    lora.warm_up()
    x = torch.zeros(ROWS, FEATURES, device=cuda)
    base = torch.zeros(ROWS, sum(WIDTHS.values()), device=cuda)
    graph = torch.cuda.CUDAGraph()
    lora.begin_decode([], ROWS)
    with torch.cuda.graph(graph):
        y = base.clone()
        lora.apply(x, y, "qkv")

    def replayed(slots: Sequence[int]) -> Tensor:
        lora.begin_decode(slots, ROWS)
        graph.replay()
        return y.clone()

    for number, slots in enumerate(([-1, 0, 1, 1, 5], [], list(range(SLOTS)) * 2, [3] * ROWS, [-1] * 4)):
        for slot in range(SLOTS):
            lora.install(random_adapter(1 + (slot * 7 + number) % 32), slot)
        x.normal_()
        base.normal_()
        out = replayed(sorted(slots))
        lora.begin_step([(slot, 1) for slot in sorted(slots)])
        expected = base.clone()
        lora.apply(x, expected, "qkv")
        assert torch.equal(out, expected)
        adapted = [slot >= 0 for slot in sorted(slots)] + [False] * (ROWS - len(slots))
        assert (out != base).any(1).tolist() == adapted


def random_adapter(rank: int) -> AdapterWeights:
    """On all three modules."""
    pairs = {
        name: LoraPair(torch.randn(rank, FEATURES, device="cuda"), torch.randn(rank, width, device="cuda"))
        for name, width in WIDTHS.items()
    }
    return AdapterWeights(pairs, rank)
