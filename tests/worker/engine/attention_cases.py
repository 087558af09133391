"""Compares the kernels with attention in torch, case by case: python attention_cases.py cpu|cuda.

Prints {dtype: {case: largest difference}} as JSON; "alone" is the difference between a row in a batch and the row
alone, "parts" that between a chunk whose splits are computed apart and one of a single program, "codes" the number of
codes and scales of int8 that differ from torch's. The torch path computes in float32, from the same numbers. On the CPU
the kernels need TRITON_INTERPRET=1, which must be set before Triton is first imported, so this is a program of its own;
and bfloat16 is wrong there.
"""

from __future__ import annotations

import json
import math
import sys
from unittest.mock import patch

import torch
from torch import Tensor

from loraplex.contracts.artifacts.families import KvShape
from loraplex.worker.engine.attention import kernels
from loraplex.worker.engine.attention.cuda import TritonPlan, triton_plan
from loraplex.worker.engine.attention.paged import KvCache, LayerCall, row_blocks
from loraplex.worker.engine.scheduling.batch import Batch, Row
from tests.worker.engine.attention_batches import Case, Numbers, cases, quantized
from tests.worker.engine.interpreted import interpret_quickly


def by_kernels(numbers: Numbers, batch: Batch | None = None) -> Tensor:
    """Run the kernels on the numbers; another batch gets the first of their queries."""
    batch = batch or numbers.batch
    return (
        triton_plan(row_blocks(batch.rows, numbers.cache.block_size), batch.decodes, numbers.cache, numbers.device)
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


def difference_of_parts(device: torch.device, dtype: torch.dtype, window: int | None = None) -> float:
    """Return the largest difference that it makes how a chunk's splits are computed; infinite where it is wrong."""
    numbers = Numbers(Case(decodes=(), chunks=((300, 5), (40, 30)), window=window, sinks=True), device, dtype)
    with patch.object(kernels, "CHUNK_SPLIT", 64):
        apart = by_kernels(numbers)
        with patch.object(kernels, "_FULL", 0):
            together = by_kernels(numbers)
        # The second half of a chunk, as its next chunk in another step.
        row = numbers.batch.rows[1]
        later = Numbers(numbers.case, device, dtype)
        later.query = later.query[20:]
        rest = by_kernels(later, Batch((Row(row.sequence, row.start + 15, 15, True),), 0, 15))
    if bool(((together - numbers.in_torch()).abs() > 3e-2).any()):
        return math.inf
    return float(max((apart - together).abs().max(), (together[20:] - rest).abs().max()))


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
        interpret_quickly()
    # Of so many cases one, because compiling and interpreting take time; bfloat16 is what models are in.
    chosen = {"float32": 2, "float16": 3, "bfloat16": 1} if place.type == "cuda" else {"float32": 3, "float16": 9}
    results = {}
    for name, every in chosen.items():
        dtype = getattr(torch, name)
        results[name] = {case: difference(value, place, dtype) for case, value in list(cases())[::every]}
        if place.type == "cuda" or name == "float32":
            results[name] |= {
                "alone": difference_alone(place, dtype),
                "parts": difference_of_parts(place, dtype),
                "parts, window": difference_of_parts(place, dtype, 100),
                "codes": different_codes(place, dtype),
            }
    print(json.dumps(results))
