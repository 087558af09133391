"""SamplingParams: who can be drawn, how often, and that a row's draw is its own."""

from __future__ import annotations

import math

import pytest
import torch

from loraplex.contracts.options import SamplingParams
from loraplex.worker.engine.sampling import step
from loraplex.worker.engine.sampling.sampler import Draw, best_of_rows, best_with_torch, gumbel_noise, row_key

pytestmark = pytest.mark.usefixtures("one_thread")


def sample(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    ids: list[int] = step.sample(logits, draws).tolist()
    return ids


def draws(count: int, **fields: float) -> list[Draw]:
    sampling = SamplingParams(seed=7, **fields)  # type: ignore[arg-type]
    return [Draw(sampling, choice=0, position=position) for position in range(count)]


def frequencies(logits: torch.Tensor, count: int, **fields: float) -> torch.Tensor:
    """Return the share of each id [vocab] in `count` draws from logits [vocab]."""
    ids = sample(logits.expand(count, -1).clone(), draws(count, **fields))
    assert min(ids) >= 0
    return torch.bincount(torch.tensor(ids), minlength=len(logits)) / count


def assert_close_to(frequency: torch.Tensor, probability: torch.Tensor, count: int) -> None:
    """Chi-squared over the ids that can be drawn, with a bound that 1 in about 10,000 seeds would miss."""
    assert (frequency[probability == 0] == 0).all()
    possible = probability > 0
    expected = probability[possible] * count
    statistic = float(((frequency[possible] * count - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 8


LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -30.0, 0.0, 1.0, -2.0])


def test_greedy_takes_the_best() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    assert sample(logits.clone(), draws(5)) == logits.argmax(-1).tolist()
    assert sample(logits.bfloat16(), draws(5)) == logits.bfloat16().argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_gives_softmax(temperature: float) -> None:
    count = 20_000
    assert_close_to(frequencies(LOGITS, count, temperature=temperature), torch.softmax(LOGITS / temperature, -1), count)


def test_a_tiny_temperature_is_greedy() -> None:
    for temperature in (1e-3, 1e-30, 5e-324):
        assert frequencies(LOGITS, 50, temperature=temperature)[0] == 1


@pytest.mark.parametrize("top_k", [1, 3, 8, 1000])
def test_top_k_keeps_the_k_best(top_k: int) -> None:
    count = 20_000
    best = LOGITS.topk(min(top_k, 8)).indices
    kept = torch.full_like(LOGITS, -math.inf)
    kept[best] = LOGITS[best]
    assert_close_to(frequencies(LOGITS, count, temperature=1.0, top_k=top_k), torch.softmax(kept, -1), count)


@pytest.mark.parametrize(("top_p", "size"), [(1e-6, 1), (0.41, 1), (0.45, 2), (0.8, 3), (0.999999, 7)])
def test_top_p_keeps_the_fewest_that_reach_p(top_p: float, size: int) -> None:
    """Probabilities, in order: 0.417, 0.253, 0.153, 0.093, 0.056 ..."""
    count = 20_000
    best = LOGITS.topk(size).indices
    kept = torch.full_like(LOGITS, -math.inf)
    kept[best] = LOGITS[best]
    assert_close_to(frequencies(LOGITS, count, temperature=1.0, top_p=top_p), torch.softmax(kept, -1), count)


def test_top_p_counts_among_the_top_k() -> None:
    # Of the three best, renormalized, two reach 0.8; of all tokens three would be needed.
    drawn = frequencies(LOGITS, 500, temperature=1.0, top_k=3, top_p=0.8)
    assert set(drawn.nonzero()[:, 0].tolist()) == {0, 3}


def test_equal_scores_at_the_border_are_all_kept() -> None:
    drawn = frequencies(torch.tensor([1.0, 3.0, 1.0, 1.0, -5.0]), 500, temperature=1.0, top_k=2)
    assert set(drawn.nonzero()[:, 0].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("limit", [{"top_k": 3000}, {"top_p": 0.02}])
def test_limits_in_a_large_and_flat_vocabulary(limit: dict[str, float]) -> None:
    """Limits that the first look at the likeliest tokens suffices for, and others."""
    vocab = 5000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 0.1
    ordered, ids = torch.softmax(logits, -1).sort(descending=True)
    size = int(limit.get("top_k", 0)) or int((ordered.cumsum(-1) < limit["top_p"]).sum()) + 1
    drawn = frequencies(logits, 2000, temperature=1.0, **limit).nonzero()[:, 0].tolist()
    assert set(drawn) <= set(ids[:size].tolist())
    assert len(drawn) > min(size, 2000) * 0.4


def test_a_rows_draw_depends_on_nothing_else() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 3000, generator=generator) * torch.linspace(0.1, 5, 40)[:, None]
    mixed = [
        Draw(
            SamplingParams(
                temperature=[0.0, 0.7, 1.0, 1.5][row % 4],
                top_k=[0, 0, 5, 100, 2000][row % 5],
                top_p=[1.0, 0.9, 0.5][row % 3],
                seed=row // 2,
            ),
            choice=row % 2,
            position=row,
        )
        for row in range(40)
    ]
    together = sample(logits.clone(), mixed)
    assert together == [sample(logits[row : row + 1].clone(), mixed[row : row + 1])[0] for row in range(40)]
    backwards = sample(logits.flip(0).clone(), mixed[::-1])
    assert together == backwards[::-1]


def test_banned_ids_are_not_drawn() -> None:
    greedy, random = draws(1)[0], draws(1, temperature=5.0)[0]
    for draw in (greedy, random):
        banned = [
            Draw(draw.sampling, choice=0, position=position, banned_ids=frozenset({0, 3, 6})) for position in range(50)
        ]
        assert not {0, 3, 6} & set(sample(LOGITS.expand(50, -1).clone(), banned))
    assert sample(LOGITS[None].clone(), [greedy]) == [0]


def test_rows_that_are_not_numbers_are_told_apart() -> None:
    rows = torch.stack([LOGITS, torch.full((8,), math.nan), LOGITS, LOGITS.clone(), torch.full((8,), -math.inf)])
    rows[3, 4] = math.inf
    for fields in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"temperature": 1.0, "top_p": 0.5}):
        ids = sample(rows.clone(), draws(5, **fields))
        assert [token < 0 for token in ids] == [False, True, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 17, 130, 50_257])
def test_the_kernel_chooses_the_first_of_the_largest_as_torch_does(dtype: torch.dtype, vocab: int) -> None:
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits[1, vocab // 2 :: 7] = logits[1].max() + 1
    logits[2, -1] = logits[2].max() + 1
    for row, number in ((3, "nan"), (4, "inf"), (5, "-inf")):
        logits[row, -1] = float(number)
    logits[6] = float("-inf")
    expected = best_with_torch(logits)
    assert expected[3:5].tolist() == [-1, -1]
    assert expected[6] == -1
    for rows in (logits, logits[1:2], logits[:, : vocab // 2 + 1]):
        assert torch.equal(best_of_rows(rows), best_with_torch(rows))


def test_nothing_to_sample() -> None:
    assert sample(torch.empty(0, 8), []) == []


def test_noise_is_gumbel_and_does_not_correlate() -> None:
    keys = torch.tensor([row_key(seed, 0, position) for seed in range(4) for position in range(25)], dtype=torch.int32)
    noise = gumbel_noise(keys, torch.arange(4096, dtype=torch.int32)[None])
    assert noise.isfinite().all()
    # Mean: Euler's constant; variance: pi^2 / 6.
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    uniform = torch.exp(-torch.exp(-noise.double()))
    counts = torch.histc(uniform, bins=64, min=0, max=1)
    expected = uniform.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 4 * math.sqrt(2 * 63) + 8
    # Rows of neighbouring positions and seeds, and neighbouring ids in a row.
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.08
    neighbours = torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))
    assert neighbours[0, 1].abs() < 0.01


def test_noise_is_what_it_was_yesterday() -> None:
    """An answer is continued by another worker, perhaps of another version: the numbers are part of the contract."""
    keys = torch.tensor([row_key(1, 2, 3), row_key((1 << 64) - 1, 0, 0)], dtype=torch.int32)
    noise = gumbel_noise(keys, torch.tensor([[0, 1, 50_000]], dtype=torch.int32))
    assert keys.tolist() == [[-434455945, -1258595699], [-4334513, -1437753275]]
    expected = [[2.7189999, 0.6005965, 0.4817553], [2.4915833, -0.0328399, -0.1708763]]
    torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-5, atol=1e-5)
