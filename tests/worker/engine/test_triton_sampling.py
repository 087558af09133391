"""The kernels of sampling compiled for GPUs, without one."""

from __future__ import annotations

import pytest
import torch

from bench.fake_cuda import specialization
from loraplex.contracts.options import SamplingParams
from loraplex.worker.engine.sampling.sampler import Draw
from tests.worker.engine.triton_runs import compiled_for

pytest.importorskip("triton", reason="Triton is for Linux")


@pytest.mark.usefixtures("kept_compilations")
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.nightly), 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.nightly)])
def test_the_kernels_compile(dtype: torch.dtype, capability: int) -> None:
    from loraplex.worker.engine.sampling.cuda import choose_calls, totals_call

    draws = [Draw(SamplingParams(temperature=1.0, top_k=5, top_p=0.9, typical_p=0.9), 0, 1)] * 2
    calls = choose_calls(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 128_256, dtype=dtype), draws)
    assert {call.grid for call in calls[:-1]} == {(2, 16)}, "several programs share a row"
    for call in {specialization(call): call for call in calls}.values():
        assert "local" not in compiled_for(capability, call).asm["ptx"], "its sums are in registers"
    compiled_for(capability, totals_call(torch.zeros(2), torch.zeros(2, 32_000)))


def test_launches_that_no_row_needs_are_left_out() -> None:
    from loraplex.worker.engine.sampling.cuda import choose_calls

    def launched(*samplings: SamplingParams) -> list[str]:
        draws = [Draw(sampling, 0, 1) for sampling in samplings]
        ids, logits = torch.zeros(len(draws), dtype=torch.int64), torch.zeros(len(draws), 320, dtype=torch.bfloat16)
        return [call.kernel.__name__ for call in choose_calls(ids, logits, draws)]

    drawn = SamplingParams(temperature=1.0)
    assert launched(SamplingParams(), SamplingParams(top_k=4)) == ["begin_parts", "finish_rows"]
    assert launched(SamplingParams(), drawn) == ["begin_parts", "draw_parts", "finish_rows"]
    searched = launched(drawn, SamplingParams(temperature=1.0, top_k=4), SamplingParams(temperature=1.0, top_p=0.9))
    assert searched == [
        "begin_parts",
        *["weigh_parts"] * 4,
        "sum_parts",
        *["weigh_parts"] * 4,
        "draw_parts",
        "finish_rows",
    ]
