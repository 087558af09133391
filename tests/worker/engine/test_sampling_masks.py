"""Masks of grammars on logits: an id that is not allowed is never chosen, whatever else is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from loraplex.contracts.options import SamplingParams
from loraplex.worker.engine.sampling.adjustments import Adjustments
from loraplex.worker.engine.sampling.sampler import Draw, forbid_ids, forbid_with_torch
from loraplex.worker.engine.sampling.step import sample

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]
VOCAB, WORDS = 1001, 32
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(logit_bias=((7, 50.0), (8, 50.0))),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=1.0, seed=4),
    SamplingParams(temperature=0.8, top_k=5, seed=5),
    SamplingParams(temperature=2.0, top_p=0.4, seed=6),
    SamplingParams(temperature=1.0, min_p=0.2, typical_p=0.7, seed=7),
]


def mask_of(ids: list[int]) -> np.ndarray:
    bits = np.zeros(WORDS * 32, dtype=np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(2))


def draws(masks: Sequence[np.ndarray | None]) -> list[Draw]:
    made = []
    for number, (sampling, mask) in enumerate(zip(SAMPLINGS * 3, masks, strict=True)):
        adjustments = Adjustments(sampling, 3) if sampling.adjusts_logits else None
        if adjustments:
            adjustments.catch_up([1, 2, 3])
        made.append(Draw(sampling, 0, number, adjustments=adjustments, allowed=mask))
    return made


def test_only_allowed_ids_are_chosen_and_the_other_rows_are_as_they_were() -> None:
    few, many, one = [3, 500, 1000], [*range(0, VOCAB, 2)], [42]
    rows = len(SAMPLINGS)
    masks = [mask_of(few)] * rows + [mask_of(many)] * rows + [None] * rows
    scores = logits(3 * rows)
    masked = scores.clone()
    chosen = sample(masked, draws(masks)).tolist()
    assert torch.equal(masked[2 * rows :], scores[2 * rows :])
    assert set(chosen[:rows]) <= set(few)
    assert set(chosen[rows : 2 * rows]) <= set(many)
    unmasked = [replace(draw, allowed=None) for draw in draws(masks)]
    assert chosen[2 * rows :] == sample(scores, unmasked).tolist()[2 * rows :]
    assert sample(scores.clone(), draws([mask_of(one)] * 3 * rows)).tolist() == one * 3 * rows
    alone = [sample(scores[row : row + 1].clone(), [draw]).item() for row, draw in enumerate(draws(masks))]
    assert alone == chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_change_the_logits_that_they_forbid_and_no_others(dtype: torch.dtype) -> None:
    """The kernel of the CPU changes a part of the logits; other devices change all."""
    before = logits(5).to(dtype)
    some, drawn = mask_of([*range(64), 999, 1000]), np.random.default_rng(0).integers(-9, 2**31, WORDS, np.int32)
    expected = before.clone()
    for row, mask in ((1, some), (3, drawn)):
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
        expected[row, torch.from_numpy(~allowed)] = float("-inf")
    for forbid in (forbid_ids, forbid_with_torch):
        changed = before.clone()
        forbid(changed[1:4], [some, None, drawn])
        assert torch.equal(changed, expected)


def test_an_allowed_id_without_a_number_fails_its_row() -> None:
    scores = torch.full((2, VOCAB), float("nan"))
    scores[1] = 0.0
    made = [
        Draw(SamplingParams(), 0, 0, allowed=mask_of([5])),
        Draw(SamplingParams(temperature=1.0), 0, 0, allowed=mask_of([5])),
    ]
    assert sample(scores, made).tolist() == [-1, 5]
