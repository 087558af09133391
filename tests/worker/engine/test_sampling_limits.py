"""Each limit keeps what transformers' warpers keep, or what its paper defines, alone and one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from loraplex.contracts.options import SamplingParams
from loraplex.worker.engine.sampling.sampler import Draw, mask_atypical, reduced, smallest_kept
from loraplex.worker.engine.sampling.step import sample, token_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")


def smallest_by_sigma(scores: torch.Tensor, sigmas: float) -> torch.Tensor:
    """The definition of top_n_sigma (Tang et al. 2024, algorithm 1) in float64; transformers does not have it."""
    exact = scores.double()
    return exact.amax(-1, keepdim=True) - sigmas * exact.std(-1, correction=0, keepdim=True)


WARPERS: dict[str, Callable[..., Any]] = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
    "top_n_sigma": smallest_by_sigma,
    "typical_p": TypicalLogitsWarper,
}
LIMITS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 17},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.02},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {"top_n_sigma": 0.5},
    {"top_n_sigma": 2.5},
    {"typical_p": 0.2},
    {"typical_p": 0.6},
    {"typical_p": 0.97},
    {"top_k": 40, "top_p": 0.7},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_p": 0.9, "top_n_sigma": 1.5},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.03, "top_n_sigma": 2.0, "typical_p": 0.8},
]


def warped(scores: torch.Tensor, limits: dict[str, Any]) -> torch.Tensor:
    """Scores [rows, vocab] as transformers leaves them, in its order, and top_n_sigma as its paper defines it."""
    kept, every_score = scores.clone(), scores / limits.get("temperature", 1)
    for name, warper in WARPERS.items():
        if name == "top_n_sigma" and name in limits:
            kept = kept.masked_fill(kept < warper(every_score, limits[name]), -math.inf)
        elif name in limits:
            kept = warper(limits[name])(torch.zeros(len(scores), 1, dtype=torch.int64), kept)
    return kept


def random_scores(rows: int, vocab: int) -> torch.Tensor:
    """From flat rows to steep ones."""
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(11))
    return scores * torch.linspace(0.3, 6, rows)[:, None]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_the_same_tokens_are_kept_as_by_transformers(limits: dict[str, Any]) -> None:
    scores = random_scores(rows=40, vocab=300)
    samplings = [SamplingParams(temperature=1.0, **limits)] * len(scores)
    smallest, enough = smallest_kept(scores, scores.topk(300, dim=-1).values, samplings)
    assert enough.all()
    kept = scores.masked_fill(scores < smallest, -math.inf)
    if "typical_p" in limits:
        kept, enough = mask_atypical(kept, samplings, 300)
        assert enough.all()
    assert torch.equal(kept, warped(scores, limits))


@pytest.mark.parametrize("limits", [one for one in LIMITS if "typical_p" not in one], ids=str)
def test_a_first_look_at_the_likeliest_tells_the_same_or_that_it_can_not(limits: dict[str, Any]) -> None:
    scores = random_scores(rows=40, vocab=300)
    samplings = [SamplingParams(temperature=1.0, **limits)] * len(scores)
    likeliest = scores.topk(64, dim=-1).values
    looked_at, enough = smallest_kept(scores, likeliest, samplings)
    truth, _ = smallest_kept(scores, scores.topk(300, dim=-1).values, samplings)
    assert enough.any()
    torch.testing.assert_close(looked_at[enough], truth[enough], rtol=0, atol=0)
    assert (truth[~enough] <= likeliest[~enough, -1:]).all()


@pytest.mark.parametrize("mass", [0.2, 0.6, 0.97])
def test_a_look_at_the_most_typical_tells_the_same_or_that_it_can_not(mass: float) -> None:
    scores = random_scores(rows=40, vocab=300)
    samplings = [SamplingParams(temperature=1.0, typical_p=mass)] * len(scores)
    kept, enough = mask_atypical(scores, samplings, 64)
    truth = warped(scores, {"typical_p": mass})
    assert enough.any()
    assert torch.equal(kept[enough], truth[enough])
    assert (truth[~enough].isfinite().sum(-1) > 64).all()


def test_limits_of_other_rows_change_nothing() -> None:
    scores = random_scores(rows=len(LIMITS), vocab=300)
    samplings = [SamplingParams(temperature=1.0, **limits) for limits in LIMITS]
    smallest, _ = smallest_kept(scores, scores.topk(300, dim=-1).values, samplings)
    kept, _ = mask_atypical(scores.masked_fill(scores < smallest, -math.inf), samplings, 300)
    truth = torch.cat([warped(scores[row : row + 1], limits) for row, limits in enumerate(LIMITS)])
    assert torch.equal(kept, truth)


@pytest.mark.parametrize(
    "limits",
    [
        {"min_p": 0.1},
        {"top_n_sigma": 0.2},
        {"typical_p": 0.5},
        {"typical_p": 0.9},
        {"top_k": 6, "top_p": 0.95, "min_p": 0.08, "typical_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_draws_have_the_probabilities_of_the_definition(limits: dict[str, Any], temperature: float) -> None:
    """Chi-squared of 20,000 draws, each with a seed of its own; 1 in about 10,000 would miss the bound."""
    count = 20_000
    logits = torch.tensor([[2.0, -1.0, 0.5, 1.5, -30.0, 0.0, 1.0, -2.0]])
    probability = warped(logits, {"temperature": temperature, **limits}).softmax(-1)[0]
    draws = [Draw(SamplingParams(temperature=temperature, seed=seed, **limits), 0, 3) for seed in range(count)]
    drawn = torch.bincount(sample(logits.expand(count, -1), draws), minlength=8)
    assert not drawn[probability == 0].any()
    possible = probability > 0
    expected = probability[possible] * count
    freedom = int(possible.sum()) - 1
    assert freedom > 0, "there is nothing to choose from"
    statistic = float(((drawn[possible] - expected) ** 2 / expected).sum())
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 8


def test_min_p_and_typical_p_in_a_large_and_flat_vocabulary() -> None:
    """More than the first look holds: nearly everything is kept."""
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(3)) * 0.1
    several: list[dict[str, Any]] = [{"min_p": 0.5}, {"typical_p": 0.9}, {"top_p": 0.9, "min_p": 0.3}]
    for limits in several:
        kept = set(warped(logits, limits).isfinite()[0].nonzero()[:, 0].tolist())
        draws = [Draw(SamplingParams(temperature=1.0, seed=seed, **limits), 0, 0) for seed in range(1000)]
        drawn = set(sample(logits.expand(1000, -1), draws).tolist())
        assert drawn <= kept
        assert len(drawn) > 700


@pytest.fixture
def two_threads() -> Iterator[None]:
    """A large sum is divided among torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_row_has_the_same_bits_alone_and_among_others_with_threads() -> None:
    scores = torch.randn(32, 49_152, generator=torch.Generator().manual_seed(3)) * 5
    ids, count = torch.arange(32), [3] * 32
    together = token_logprobs(scores, ids, count)()
    assert [token_logprobs(scores[row, None], ids[row, None], [3])()[0] for row in range(32)] == together
    for reduction in (torch.sum, torch.nansum, torch.logsumexp):
        rows = reduced(lambda part: reduction(part, -1, keepdim=True), scores)  # noqa: B023
        alone = [reduced(lambda part: reduction(part, -1, keepdim=True), row[None]) for row in scores]  # noqa: B023
        assert torch.equal(torch.cat(alone), rows)
