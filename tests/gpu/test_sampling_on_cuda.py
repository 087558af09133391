"""The kernel of sampling on the device, against the CPU's path."""

from __future__ import annotations

import pytest
import torch

from tests.worker.engine.triton_runs import results_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


def test_the_kernel_chooses_the_ids_that_the_cpu_chooses() -> None:
    """Logarithms and exponentials differ in their last bit: one id in a hundred may be the other of two near ones."""
    [counts] = results_of(["sampling_cases.py"], "cuda")
    assert len(counts) == 34
    differing, rows = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
    assert differing <= rows / 100
