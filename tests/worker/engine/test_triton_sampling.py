"""The kernel of sampling compiled for GPUs, without one."""

from __future__ import annotations

import pytest
import torch

from loraplex.contracts.options import SamplingParams
from loraplex.worker.engine.sampling.sampler import Draw
from tests.worker.engine.triton_runs import compiled_for

pytest.importorskip("triton", reason="Triton is for Linux")


@pytest.mark.usefixtures("kept_compilations")
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.nightly), 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.nightly)])
def test_the_kernel_compiles(dtype: torch.dtype, capability: int) -> None:
    from loraplex.worker.engine.sampling.cuda import choose_call, totals_call

    draws = [Draw(SamplingParams(temperature=1.0, top_k=5, top_p=0.9), 0, 1)] * 2
    call = choose_call(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 32_000, dtype=dtype), draws)
    assert call.grid == (2,), "one launch for all rows, whatever they ask for"
    compiled = compiled_for(capability, call)
    assert "local" not in compiled.asm["ptx"], "its sums are in registers"
    compiled_for(capability, totals_call(torch.zeros(2), torch.zeros(2, 32_000)))
