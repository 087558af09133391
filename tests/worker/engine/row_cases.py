"""Compares the kernels of normalizations and gates with torch's operators: python row_cases.py cpu|cuda.

Prints {dtype: {case: difference}} as JSON, the largest difference over the largest number. See triton_runs.py.
"""

from __future__ import annotations

import json
import sys

import torch
from torch.nn.functional import silu

from tests.worker.engine.interpreted import replace_language_once
from worker.engine.decoder.cuda import FORMS, NormForm, gate_call

# bfloat16 is wrong in the interpreter.
DTYPES = {"cpu": (torch.float32, torch.float16), "cuda": (torch.float32, torch.float16, torch.bfloat16)}


def differences(dtype: torch.dtype, device: str) -> dict[str, float]:
    """Return the difference of each case."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for columns in (16, 100, 3000):
        x = (torch.randn(5, 2 * columns, generator=generator) * 3).to(dtype)
        weight = torch.randn(columns, generator=generator).to(dtype)
        for offset, late in FORMS:
            form = NormForm(1e-5, offset, late)
            out = torch.zeros(5, columns, dtype=dtype, device=device)
            form.call(x.to(device)[:, :columns], weight.to(device), out).launch()
            found[f"norm of {columns}, {offset:g}, {late}"] = difference(out, form.compute(x[:, :columns], weight))
        out = torch.zeros(5, columns, dtype=dtype, device=device)
        gate_call(x.to(device), out).launch()
        found[f"gate of {columns}"] = difference(out, silu(x[:, :columns]) * x[:, columns:])
    return found


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest number."""
    return float((actual.cpu().float() - expected.float()).abs().max() / expected.float().abs().max())


if __name__ == "__main__":
    device = sys.argv[1]
    if device == "cpu":
        replace_language_once()
    print(json.dumps({str(dtype).removeprefix("torch."): differences(dtype, device) for dtype in DTYPES[device]}))
