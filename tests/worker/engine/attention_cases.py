"""Compares the kernels with attention in torch, case by case: python attention_cases.py cpu|cuda.

Prints {dtype: {case: largest difference}} as JSON; "alone" is the difference between a row in a batch and the row
alone, "codes" the number of codes and scales of int8 that differ from torch's. The torch path computes in float32, from
the same numbers. On the CPU the kernels need TRITON_INTERPRET=1, which must be set before Triton is first imported, so
this is a program of its own; and bfloat16 is wrong there.
"""

from __future__ import annotations

import json
import math
import sys

import torch
from torch import Tensor

from artifacts.families import KvShape
from tests.worker.engine.attention_batches import Case, Numbers, cases, quantized
from tests.worker.engine.interpreted import replace_language_once
from worker.engine.attention.cuda import TritonPlan, triton_plan
from worker.engine.attention.paged import KvCache, LayerCall
from worker.engine.scheduling.sequence import Batch


def by_kernels(numbers: Numbers, batch: Batch | None = None) -> Tensor:
    """Run the kernels on the numbers; another batch gets the first of their queries."""
    batch = batch or numbers.batch
    return (
        triton_plan(batch, numbers.cache, numbers.device)
        .attend(numbers.call(batch.tokens), numbers.cache)
        .float()
        .cpu()
    )


def difference(case: Case, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference of any output; infinite where one is not a number."""
    numbers = Numbers(case, device, dtype)
    return float((by_kernels(numbers) - numbers.in_torch()).abs().max().nan_to_num(math.inf))


def difference_alone(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference between a row's result alone and in its batch, which should be 0."""
    numbers = Numbers(Case(decodes=(300, 5, 12), window=200), device, dtype)
    alone = by_kernels(numbers, Batch(numbers.batch.rows[:1], 1, 1))
    return float((alone - by_kernels(numbers)[:1]).abs().max().nan_to_num(math.inf))


def different_codes(device: torch.device, dtype: torch.dtype) -> int:
    """Write keys and values into a cache of int8; how many codes and scales are not those of torch."""
    generator = torch.Generator().manual_seed(5)
    cache = KvCache(KvShape(1, 2, 24, 6), 4, 4, dtype, device, int8=True)
    key, value = (torch.randn(2, 5, dim, generator=generator).to(device, dtype).transpose(0, 1) for dim in (24, 6))
    key[1], key[2, 0] = 0, key[2, 0] * 1e-4
    value[3, 1, 2] = math.inf
    slots = torch.tensor([3, 9, 2, 7, 11], device=device)
    TritonPlan(None, None).quantize(LayerCall(0, key, key, value, 1.0), slots, cache)
    different = 0
    for numbers, codes, scales in zip((key, value), cache.slots[0], cache.scales[0], strict=True):
        # On the CPU, where torch's division is IEEE's.
        expected, expected_scales = quantized(numbers.cpu())
        sound, own = expected_scales.isfinite(), (codes[slots].cpu(), scales[slots].cpu())
        different += int((own[0] != expected)[sound].sum() + (own[1] != expected_scales).sum())
    return different


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = torch.device(sys.argv[1])
    if place.type == "cpu":
        replace_language_once()
    # Of so many cases one: float32 says most, and interpreting takes its time.
    chosen = {"float32": 1, "float16": 1, "bfloat16": 1} if place.type == "cuda" else {"float32": 3, "float16": 9}
    print(
        json.dumps(
            {
                name: {case: difference(value, place, getattr(torch, name)) for case, value in list(cases())[::every]}
                | {
                    "alone": difference_alone(place, getattr(torch, name)),
                    "codes": different_codes(place, getattr(torch, name)),
                }
                for name, every in chosen.items()
            }
        )
    )
