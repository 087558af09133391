"""The kernels of attention on the device, against the torch path on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.worker.engine.triton_runs import results_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

# Sums of a few hundred products of numbers around 1, in each type.
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
CASES = {"float32": 16, "float16": 11, "bfloat16": 31}


def test_kernels_compute_what_torch_computes() -> None:
    [differences] = results_of(["attention_cases.py"], "cuda")
    for name, tolerance in TOLERANCES.items():
        same = [differences[name].pop(case) for case in ("alone", "parts", "parts, window", "codes")]
        assert same == [0] * 4
        assert len(differences[name]) == CASES[name]
        assert {case: value for case, value in differences[name].items() if value > tolerance} == {}, name
