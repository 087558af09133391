"""Compares the kernels with attention in torch, case by case: python attention_cases.py cpu|cuda.

Prints {dtype: {case: largest difference}} as JSON; "alone" is the difference between a row in a batch and the row
alone. The torch path computes in float32, from the same numbers. On the CPU the kernels need TRITON_INTERPRET=1, which
must be set before Triton is first imported, so this is a program of its own; and bfloat16 is wrong there.
"""

from __future__ import annotations

import json
import math
import sys

import torch
from torch import Tensor

from tests.worker.engine.attention_batches import Case, Numbers, cases
from worker.engine.attention.cuda.plan import triton_plan
from worker.engine.scheduling.batch import Batch


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = torch.device(sys.argv[1])
    # Of so many cases one: float32 says most, and interpreting takes its time.
    chosen = {"float32": 1, "float16": 1, "bfloat16": 1} if place.type == "cuda" else {"float32": 1, "float16": 5}
    print(
        json.dumps(
            {
                name: {case: difference(value, place, getattr(torch, name)) for case, value in list(cases())[::every]}
                | {"alone": difference_alone(place, getattr(torch, name))}
                for name, every in chosen.items()
            }
        )
    )
