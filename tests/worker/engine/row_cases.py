"""Compares the kernels of normalizations, gates and rotations with torch's operators: python row_cases.py cpu|cuda.

Prints {dtype: {case: difference}} as JSON, the largest difference over the largest number. See triton_runs.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import gelu, silu

from loraplex.contracts.artifacts.families import KvShape
from loraplex.worker.engine.attention.paged import AttentionStep, KvCache, LayerCall
from loraplex.worker.engine.decoder.cuda import gate_call, norm_call, rotate_call
from loraplex.worker.engine.decoder.recognition import NORMS, AttentionForm, Norm
from tests.worker.engine.interpreted import interpret_quickly

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
        for offset, late in NORMS:
            form = Norm(weight, 1e-5, offset, late)
            norm = replace(form, weight=weight.to(device))
            out = torch.zeros(5, columns, dtype=dtype, device=device)
            norm_call(norm, x.to(device)[:, :columns], out).launch()
            found[f"norm of {columns}, {offset:g}, {late}"] = difference(out, form.compute(x[:, :columns]))
            # The sums, in what is kept of them, are those of torch's operator.
            added, sums = (x[:, columns:].to(device).contiguous(), torch.zeros_like(out))
            norm_call(norm, x.to(device)[:, :columns], out, added, sums).launch()
            expected = x[:, :columns] + x[:, columns:]
            assert torch.equal(sums.cpu(), expected)
            found[f"sum and norm of {columns}, {offset:g}, {late}"] = difference(out, form.compute(expected))
            norm_call(None, x.to(device)[:, :columns], None, added, sums, norm).launch()
            expected = x[:, :columns] + form.compute(x[:, columns:])
            found[f"normed sum of {columns}, {offset:g}, {late}"] = difference(sums, expected)
        out = torch.zeros(5, columns, dtype=dtype, device=device)
        gate_call(x.to(device), out).launch()
        found[f"gate of {columns}"] = difference(out, silu(x[:, :columns]) * x[:, columns:])
        gate_call(x.to(device), out, gelu=True).launch()
        found[f"gelu of {columns}"] = difference(out, gelu(x[:, :columns], approximate="tanh") * x[:, columns:])
    for dim, value_dim, heads, kv_heads, turned in (
        (16, 16, 4, 2, 16),
        (24, 10, 3, 1, 24),
        (16, 16, 4, 2, 8),
        (40, 40, 2, 2, 20),
    ):
        attention = AttentionForm(heads, kv_heads, dim, value_dim, turned, CALL)
        found[f"rotation of {turned} in {heads} heads of {dim}"] = rotation(dtype, device, attention)
        for what, sizes in {"each": (dim, dim), "all": (heads * dim, kv_heads * dim)}.items():
            query, key = (
                Norm(torch.randn(size, generator=generator).to(device, dtype), 1e-6, 1.0, late=True) for size in sizes
            )
            normed = replace(attention, norms=(query, key))
            found[f"norm of {what}, rotation of {turned} in {heads} heads of {dim}"] = rotation(dtype, device, normed)
    return found


def rotation(dtype: torch.dtype, device: str, form: AttentionForm) -> float:
    """Compare queries in their rows, and keys and values in the cache."""
    generator, tokens = torch.Generator().manual_seed(2), 5
    x, cos, sin = (
        torch.randn(tokens, size, generator=generator).to(dtype)
        for size in (sum(form.widths), form.columns, form.columns)
    )
    cache = KvCache(
        KvShape(1, form.kv_heads, form.key_dim, form.value_dim), 3, 4, dtype, torch.device(device), int8=False
    )
    slots = torch.tensor([9, 2, 4, 0, 7])
    normed, norms = x[:, : sum(form.widths[:2])].clone(), form.norms
    if norms is not None:
        on_cpu = (replace(norm, weight=norm.weight.cpu()) for norm in norms)
        pairs = zip(normed.split_with_sizes(form.widths[:2], 1), on_cpu, strict=True)
        parts = [norm.compute(part.reshape(tokens, -1, len(norm.weight))) for part, norm in pairs]
        normed = torch.cat([part.flatten(1) for part in parts], 1)
    call = form.call_of(normed, x)

    def rotated(part: torch.Tensor) -> torch.Tensor:
        part, rest = part[..., : form.columns], part[..., form.columns :]
        first, second = part.chunk(2, -1)
        return torch.cat([part * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None], rest], -1)

    expected = [rotated(call.query), rotated(call.key), call.value.clone()]
    step = AttentionStep(cache, slots.to(device), PLAN)
    on_device, turned = x.to(device), torch.zeros_like(normed, device=device)
    rotate_call(form, turned, on_device, cos.to(device), sin.to(device), step).launch()
    keys, values = (part[slots.to(device)] for part in cache.slots[0])
    assert torch.equal(form.call_of(turned, on_device).key, keys)
    actual = [form.call_of(turned, on_device).query, keys, values]
    return max(difference(mine, own) for mine, own in zip(actual, expected, strict=True))


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest number."""
    return float((actual.cpu().float() - expected.float()).abs().max() / expected.float().abs().max())


if __name__ == "__main__":
    device = sys.argv[1]
    if device == "cpu":
        interpret_quickly()
    print(json.dumps({str(dtype).removeprefix("torch."): differences(dtype, device) for dtype in DTYPES[device]}))
