"""Ids of Triton's sampling beside those of the CPU's: python sampling_cases.py cpu|cuda; see triton_runs.py.

Prints, by case, how many ids differ, of how many.
"""

from __future__ import annotations

import json
import sys

import torch

from loraplex.contracts.options import SamplingParams
from loraplex.worker.engine.sampling import cuda
from loraplex.worker.engine.sampling.adjustments import Adjustments
from loraplex.worker.engine.sampling.cuda import sample_with_triton
from loraplex.worker.engine.sampling.sampler import Draw
from loraplex.worker.engine.sampling.step import sample
from tests.worker.engine.interpreted import interpret_quickly

# Rows of special logits, and ordinary ones in front and behind: interpreted, of fewer.
ROWS = {"cpu": 8, "cuda": 10}
CASES = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "tiny temperature": SamplingParams(temperature=1e-20),
    "top_k": SamplingParams(temperature=1.3, top_k=7),
    "top_k 1": SamplingParams(temperature=1.3, top_k=1),
    "top_k of all": SamplingParams(temperature=1.0, top_k=10_000),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "small top_p": SamplingParams(temperature=1.0, top_p=1e-6),
    "top_k and top_p": SamplingParams(temperature=2.0, top_k=30, top_p=0.6),
    "min_p": SamplingParams(temperature=1.5, min_p=0.1),
    "top_n_sigma": SamplingParams(temperature=1.5, top_n_sigma=1.2),
    "typical_p": SamplingParams(temperature=1.0, typical_p=0.5),
    "small typical_p": SamplingParams(temperature=1.0, typical_p=1e-6),
    "all": SamplingParams(temperature=3.0, top_k=50, top_p=0.9, min_p=0.01, top_n_sigma=2.5, typical_p=0.8),
    "all but typical_p": SamplingParams(temperature=3.0, top_k=50, top_p=0.9, min_p=0.01, top_n_sigma=2.5),
    "penalties": SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.5, frequency_penalty=0.5),
    "bias": SamplingParams(logit_bias=((3, 9.0),), allowed_token_ids=(3, 4, 5)),
}
# Several parts of a vocabulary: interpreted, of fewer columns.
VOCABS = {"cpu": {torch.float32: 1000, torch.bfloat16: 640}, "cuda": {torch.float32: 9000, torch.bfloat16: 40_000}}
INTERPRETED_COLUMNS = 512
# Interpreting takes its time: of bfloat16 the rows with every limit alone.
NARROW = {"cuda": CASES.keys(), "cpu": {"all", "penalties"}}


def different(name: str, sampling: SamplingParams, dtype: torch.dtype, device: str) -> tuple[int, int]:
    """Compare rows of random logits, some of which are forbidden, equal, not numbers, or all forbidden."""
    generator = torch.Generator().manual_seed(len(name))
    rows = ROWS[device]
    logits = (torch.randn(rows, VOCABS[device][dtype], generator=generator) * 3).to(dtype)
    logits[1, ::2] = float("-inf")
    logits[2, 100:200] = logits[2].max()
    logits[3, 7] = float("nan")
    logits[4] = float("-inf")
    logits[5, 9] = float("inf")
    logits[6] = 1.0
    draws = []
    for row in range(rows):
        adjustments = Adjustments(sampling, 4) if sampling.adjusts_logits else None
        if adjustments is not None:
            adjustments.catch_up([5, 6, 7, 8, 9, 9, 9, row])
        chosen = SamplingParams(**{field: getattr(sampling, field) for field in sampling.__slots__} | {"seed": row})
        draws.append(Draw(chosen, row % 3, row * 7, frozenset({11, 12} if row % 2 else ()), adjustments))
    expected = sample(logits.clone(), draws)
    ids = sample_with_triton(logits.to(device), draws).cpu()
    assert expected[3:6].tolist() == [-1, -1, -1]
    return int((ids != expected).sum()), len(expected)


if __name__ == "__main__":
    device = sys.argv[1]
    if device == "cpu":
        interpret_quickly()
        cuda.PART = cuda._COLUMNS = INTERPRETED_COLUMNS
    print(
        json.dumps(
            {
                f"{name} {dtype}": different(name, sampling, dtype, device)
                for name, sampling in CASES.items()
                for dtype in VOCABS[device]
                if dtype == torch.float32 or name in NARROW[device]
            }
        )
    )
