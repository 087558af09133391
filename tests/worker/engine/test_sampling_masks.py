"""Masks of grammars on logits: an id that is not allowed is never chosen, whatever else is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from worker.engine.sampling.adjustments import Adjustments
from worker.engine.sampling.allowed import _on_device, _on_host, best_allowed, forbid_ids
from worker.engine.sampling.sampler import Draw, sample
from worker.engine_api import Sampling

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]
VOCAB, WORDS = 1001, 32
SAMPLINGS = [
    Sampling(),
    Sampling(logit_bias=((7, 50.0), (8, 50.0))),
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=1.0, seed=4),
    Sampling(temperature=0.8, top_k=5, seed=5),
    Sampling(temperature=2.0, top_p=0.4, seed=6),
    Sampling(temperature=1.0, min_p=0.2, typical_p=0.7, seed=7),
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
    before = scores.clone()
    for wait in (True, False):
        chosen = sample(scores, draws(masks), wait=wait).tolist()
        assert set(chosen[:rows]) <= set(few)
        assert set(chosen[rows : 2 * rows]) <= set(many)
        assert torch.equal(scores, before)
        unmasked = [replace(draw, allowed=None) for draw in draws(masks)]
        assert chosen[2 * rows :] == sample(scores, unmasked, wait=wait).tolist()[2 * rows :]
        assert sample(scores, draws([mask_of(one)] * 3 * rows), wait=wait).tolist() == one * 3 * rows
        if wait:
            alone = [sample(scores[row : row + 1], [draw]).item() for row, draw in enumerate(draws(masks))]
            assert alone == chosen


def test_the_best_allowed_id_is_that_of_the_masked_logits() -> None:
    (scores,) = logits(1)
    best = int(scores.argmax())
    for ids in ([best, 3], [4, 5, 6], [*range(0, VOCAB, 3)]):
        masked = scores[None].clone()
        forbid_ids(masked, [mask_of(ids)])
        assert best_allowed(scores, best, mask_of(ids)) == (int(masked.argmax()), float(masked.max()))


def test_bits_are_unpacked_alike_on_host_and_device() -> None:
    scores = logits(2)
    bits = np.stack([mask_of([0, 31, 32, 999]), mask_of([1000])])
    assert torch.equal(_on_host(bits, scores), _on_device(bits, scores))
    assert torch.nonzero(~_on_host(bits, scores)).tolist() == [[0, 0], [0, 31], [0, 32], [0, 999], [1, 1000]]


def test_an_allowed_id_without_a_number_fails_its_row() -> None:
    scores = torch.full((2, VOCAB), float("nan"))
    scores[1] = 0.0
    made = [Draw(Sampling(), 0, 0, allowed=mask_of([5])), Draw(Sampling(temperature=1.0), 0, 0, allowed=mask_of([5]))]
    assert sample(scores, made).tolist() == [-1, 5]
