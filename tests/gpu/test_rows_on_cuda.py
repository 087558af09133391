"""The kernels of rows on the device: normalizations, gates, rotations, and products with quantized weights."""

from __future__ import annotations

import pytest
import torch

from tests.worker.engine.triton_runs import results_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

# Of float32 sums in another order, and of a rounding that they move, in each type.
TOLERANCES = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


def test_kernels_compute_what_torch_computes() -> None:
    differences, differing = results_of(["row_cases.py", "invariant_cases.py"], "cuda")
    for name, tolerance in TOLERANCES.items():
        assert len(differences[name]) == 39
        assert {case: value for case, value in differences[name].items() if value > tolerance} == {}, name
        # With the kernels of batch invariance a row alone has the bits that it has beside others.
        differing[name].pop("decode kernel")
        assert set(differing[name].values()) == {0}, name


def test_products_with_codes_are_those_of_the_definition() -> None:
    [differences] = results_of(["product_cases.py"], "cuda")
    for name, tolerance in TOLERANCES.items():
        assert (differences[name].pop("alone"), differences[name].pop("same tile")) == (0, 0)
        assert len(differences[name]) == 42
        assert {case: value for case, value in differences[name].items() if value > tolerance} == {}, name
