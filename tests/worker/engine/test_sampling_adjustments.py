"""Bias, penalties and bans: against transformers' processors, and against plain loops."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from loraplex.contracts.options import SamplingParams
from loraplex.worker.engine.sampling.adjustments import Adjustments, adjust_logits
from loraplex.worker.engine.sampling.sampler import Draw
from loraplex.worker.engine.sampling.step import sample

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 97
PROMPT = (5, 6, 7, 5, 90)
ANSWER = (7, 8, 8, 8, 96, 0)


def logits(rows: int = 1, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def adjusted(
    scores: torch.Tensor, sampling: SamplingParams, prompt: tuple[int, ...], answer: tuple[int, ...]
) -> torch.Tensor:
    """Return a row's scores [1, vocab], its ids having come one by one."""
    adjustments = Adjustments(sampling, len(prompt))
    ids = list(prompt)
    adjustments.catch_up(ids)
    for token in answer:
        ids.append(token)
        adjustments.catch_up(ids)
    scores = scores.clone()
    adjust_logits(scores, [adjustments], [()])
    return scores


@pytest.mark.parametrize("penalty", [0.5, 0.9, 1.2, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    scores = logits()
    truth = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([PROMPT + ANSWER]), scores.clone())
    torch.testing.assert_close(adjusted(scores, SamplingParams(repetition_penalty=penalty), PROMPT, ANSWER), truth)


@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (0.0, 1.3), (-2.0, 2.0)])
def test_frequency_and_presence_count_the_answer_alone(frequency: float, presence: float) -> None:
    scores = logits()
    truth = scores.clone()
    for token, count in Counter(ANSWER).items():
        truth[0, token] -= count * frequency + presence
    sampling = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    torch.testing.assert_close(adjusted(scores, sampling, PROMPT, ANSWER), truth)
    assert torch.equal(adjusted(scores, sampling, PROMPT, ()), scores), "there is no answer yet"


def test_bias_comes_first_and_frequency_after_repetition() -> None:
    scores = torch.zeros(1, VOCAB)
    scores[0, 8] = -4.0
    sampling = SamplingParams(logit_bias=((8, 6.0), (9, -3.0)), repetition_penalty=2.0, frequency_penalty=0.25)
    truth = torch.zeros(1, VOCAB)
    truth[0, 8] = (-4.0 + 6.0) / 2 - 3 * 0.25
    truth[0, 9] = -3.0
    truth[0, [0, 7, 96]] = -0.25
    torch.testing.assert_close(adjusted(scores, sampling, PROMPT, ANSWER), truth)


def test_ids_that_came_at_once_count_as_if_one_by_one() -> None:
    """A continuation of another worker's answer knows its ids from the start."""
    sampling = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2)
    at_once = Adjustments(sampling, len(PROMPT))
    at_once.catch_up(PROMPT + ANSWER)
    scores = logits()
    one_by_one = adjusted(scores, sampling, PROMPT, ANSWER)
    adjust_logits(scores, [at_once], [()])
    assert torch.equal(scores, one_by_one)


def test_a_draft_of_a_long_prompt_counts_as_if_it_had_come_and_copies_no_table() -> None:
    sampling, prompt, drafted = (
        SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3),
        range(40_000),
        (7, 50_000, 7),
    )
    first, whole = Adjustments(sampling, 40_000), Adjustments(sampling, 40_000)
    first.catch_up([*prompt, 7, 8])
    tracemalloc.start()
    following = first.after(drafted)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 20 * len(prompt)
    whole.catch_up([*prompt, 7, 8, *drafted])
    assert (following.ids, following.counts) == (whole.ids, whole.counts)
    assert first.after((50_000,)).counts != following.counts
    first.catch_up([*prompt, 7, 8, 9])
    assert (first.ids[-1], first.counts[7:10].tolist(), first.after((50_000,)).counts[-1]) == (39_999, [1, 1, 1], 1)


def test_a_row_is_adjusted_by_its_own_request_alone() -> None:
    chance = random.Random(4)
    kinds = [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(frequency_penalty=0.5, temperature=0.8, seed=4),
        SamplingParams(presence_penalty=-1.0, logit_bias=((3, 5.0), (4, -100.0))),
        SamplingParams(logit_bias=((90, 50.0),), temperature=1.0, top_k=9, seed=1),
        SamplingParams(repetition_penalty=0.8, presence_penalty=1.0, temperature=1.0, typical_p=0.7, min_p=0.01),
    ]
    draws = []
    for row in range(30):
        sampling = kinds[row % len(kinds)]
        ids = [chance.randrange(VOCAB) for _ in range(12)]
        adjustments = None
        if sampling.adjusts_logits:
            adjustments = Adjustments(sampling, 5)
            adjustments.catch_up(ids)
        draws.append(Draw(sampling, 0, 12, frozenset({1, 2}) if row % 4 == 0 else frozenset(), adjustments))
    scores = logits(30)
    before = scores.clone()
    together = sample(scores, draws).tolist()
    assert torch.equal(scores, before), "whoever is sampled again alone, after a fault, must find the same logits"
    assert together == [int(sample(scores[row : row + 1], draws[row : row + 1])) for row in range(30)]


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_penalties_beyond_float32_make_no_infinities(penalty: float) -> None:
    scores = torch.tensor([[0.0, 2.0, -2.0, 1.0]])
    adjustments = Adjustments(SamplingParams(repetition_penalty=penalty), 3)
    adjustments.catch_up([0, 1, 2])
    adjust_logits(scores, [adjustments], [{3}])
    assert scores[0, :3].isfinite().all()


def test_banned_ids_stay_banned_whatever_their_bias() -> None:
    sampling = SamplingParams(logit_bias=((3, 100.0),))
    for one in (sampling, replace(sampling, temperature=1.0)):
        draw = Draw(one, 0, 0, frozenset({3}), Adjustments(one, 1))
        assert int(sample(torch.zeros(1, VOCAB), [draw])) != 3
        assert int(sample(torch.zeros(1, VOCAB), [replace(draw, banned_ids=frozenset())])) == 3


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=3),
        SamplingParams(temperature=1.1, top_k=5, seed=4),
        SamplingParams(temperature=1.0, typical_p=0.7, seed=5, repetition_penalty=1.2),
    ],
)
def test_only_allowed_ids_come_and_as_if_there_were_no_others(sampling: SamplingParams) -> None:
    """The draw is that of logits whose other ids are -inf, as transformers' forced and suppressed tokens are made."""
    allowed = (3, 40, 41, 96)
    scores = logits(20)
    hidden = torch.full_like(scores, float("-inf"))
    hidden[:, allowed] = scores[:, allowed]

    def draws(each: SamplingParams) -> list[Draw]:
        made = []
        for row in range(20):
            adjustments = Adjustments(each, 2) if each.adjusts_logits else None
            if adjustments is not None:
                adjustments.catch_up([40, 41, 3])
            made.append(Draw(each, row, 12, frozenset({41}) if row % 3 == 0 else frozenset(), adjustments))
        return made

    restricted = sample(scores, draws(replace(sampling, allowed_token_ids=allowed))).tolist()
    assert restricted == sample(hidden, draws(sampling)).tolist()
    assert set(restricted) <= set(allowed)
    assert 41 not in restricted[::3]
