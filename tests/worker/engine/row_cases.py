"""Compares the kernels of normalizations, gates and rotations with torch's operators: python row_cases.py cpu|cuda.

Prints {dtype: {case: difference}} as JSON, the largest difference over the largest number. See triton_runs.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.nn.functional import silu

from artifacts.families import KvShape
from tests.worker.engine.interpreted import replace_language_once
from worker.engine.attention.paged import AttentionStep, KvCache, LayerCall
from worker.engine.decoder.cuda import FORMS, AttentionForm, NormForm, gate_call

NOTHING = torch.empty(0)
CALL = LayerCall(0, NOTHING, NOTHING, NOTHING, 1.0)
PLAN: Any = None
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
            # The sums, in what is kept of them, are those of torch's operator.
            added, sums = (x[:, columns:].to(device).contiguous(), torch.zeros_like(out))
            form.call(x.to(device)[:, :columns], weight.to(device), out, added, sums).launch()
            expected = x[:, :columns] + x[:, columns:]
            assert torch.equal(sums.cpu(), expected)
            found[f"sum and norm of {columns}, {offset:g}, {late}"] = difference(out, form.compute(expected, weight))
        out = torch.zeros(5, columns, dtype=dtype, device=device)
        gate_call(x.to(device), out).launch()
        found[f"gate of {columns}"] = difference(out, silu(x[:, :columns]) * x[:, columns:])
    for dim, value_dim, heads, kv_heads in ((16, 16, 4, 2), (24, 10, 3, 1)):
        found[f"rotation of {heads} heads of {dim}"] = rotation(
            dtype, device, AttentionForm(CALL, heads, kv_heads, dim, value_dim)
        )
    return found


def rotation(dtype: torch.dtype, device: str, form: AttentionForm) -> float:
    """Compare queries in their rows, and keys and values in the cache."""
    generator, tokens = torch.Generator().manual_seed(2), 5
    x, cos, sin = (
        torch.randn(tokens, size, generator=generator).to(dtype) for size in (sum(form.widths), form.dim, form.dim)
    )
    cache = KvCache(KvShape(1, form.kv_heads, form.dim, form.value_dim), 3, 4, dtype, torch.device(device), int8=False)
    slots = torch.tensor([9, 2, 4, 0, 7])
    call = form.of(x)

    def rotated(part: torch.Tensor) -> torch.Tensor:
        first, second = part.chunk(2, -1)
        return part * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    expected = [rotated(call.query), rotated(call.key), call.value.clone()]
    step = AttentionStep(cache, slots.to(device), PLAN)
    on_device = x.to(device, copy=True)
    form.rotate_call(on_device, cos.to(device), sin.to(device), step).launch()
    keys, values = (part[slots.to(device)] for part in cache.slots[0])
    assert torch.equal(form.of(on_device).key, keys)
    actual = [form.of(on_device).query, keys, values]
    return max(difference(mine, own) for mine, own in zip(actual, expected, strict=True))


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest number."""
    return float((actual.cpu().float() - expected.float()).abs().max() / expected.float().abs().max())


if __name__ == "__main__":
    device = sys.argv[1]
    if device == "cpu":
        replace_language_once()
    print(json.dumps({str(dtype).removeprefix("torch."): differences(dtype, device) for dtype in DTYPES[device]}))
