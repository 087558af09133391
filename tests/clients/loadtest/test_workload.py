"""Test the contents of requests: the statistics of the draws, and that every process draws the same."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from loraplex.loadtest.arrivals import Closed, Extent
from loraplex.loadtest.draws import Fixed, Lengths, Listed, LogNormal, Popularity, Uniform, power_law
from loraplex.loadtest.plan import Cancel, Deadline, LoadPlan, Tenant, TraceRow
from loraplex.loadtest.workload import Workload

RNG_SEED = 11
COUNT = 20_000


def plan(*tenants: Tenant, seed: int = 1, trace: tuple[TraceRow, ...] = ()) -> LoadPlan:
    return LoadPlan("test", Closed(1), Extent(1), tenants or (Tenant("acme"),), trace=trace, seed=seed)


@pytest.mark.parametrize(
    ("lengths", "low", "high", "median"),
    [
        (Fixed(9), 9, 9, 9),
        (Uniform(10, 20), 10, 20, 15),
        (LogNormal(100, 0.5, 400, 20), 20, 400, 100),
        (Listed((1, 1, 1, 50)), 1, 50, 1),
    ],
)
def test_lengths(lengths: Lengths, low: int, high: int, median: int) -> None:
    drawn = lengths.draw(np.random.default_rng(RNG_SEED), COUNT)
    assert (drawn.min(), drawn.max()) == (low, high)
    assert np.median(drawn) == pytest.approx(median, rel=0.03)


def test_a_log_normal_s_logarithm_is_normal() -> None:
    drawn = np.log(LogNormal(1e6, 0.7, 10**9).draw(np.random.default_rng(RNG_SEED), COUNT))
    assert drawn.mean() == pytest.approx(np.log(1e6), abs=4 * 0.7 / COUNT**0.5)
    assert drawn.std() == pytest.approx(0.7, rel=0.03)


def test_popularity_follows_the_power_law() -> None:
    names = tuple(f"a{number}" for number in range(100))
    drawn = np.bincount(power_law(names, 1.0).draw(np.random.default_rng(RNG_SEED), COUNT), minlength=100)
    harmonic = sum(1 / rank for rank in range(1, 101))
    for rank in (1, 2, 5, 20):
        expected = COUNT / rank / harmonic
        assert drawn[rank - 1] == pytest.approx(expected, abs=4 * expected**0.5)
    flat = np.bincount(power_law(names, 0.0).draw(np.random.default_rng(RNG_SEED), COUNT), minlength=100)
    assert flat == pytest.approx(200, abs=5 * 200**0.5)
    only = Popularity(("a", "b"), (1.0, 3.0)).draw(np.random.default_rng(RNG_SEED), COUNT)
    assert only.mean() == pytest.approx(0.75, abs=0.02)


def test_tenants_get_their_shares_and_ask_for_their_own() -> None:
    big = Tenant("big", 3.0, power_law(("a", "base"), 0.0), prompt_tokens=Fixed(5), answer_tokens=Fixed(7))
    small = Tenant("small", 1.0, prompts=("hello",), deadline=Deadline(0.25, 1.5), cancel=Cancel(0.5, Uniform(2, 4)))
    workload = Workload(plan(big, small))
    requests = [workload.request(index) for index in range(8_000)]
    assert [request.index for request in requests] == list(range(8_000))
    of_big = [request for request in requests if request.tenant == 0]
    of_small = [request for request in requests if request.tenant == 1]
    assert len(of_big) == pytest.approx(6_000, abs=160)
    assert {(r.prompt, r.prompt_tokens, r.answer_tokens, r.deadline_s, r.cancel_after) for r in of_big} == {
        (None, 5, 7, None, None)
    }
    assert workload.adapters == [(0, "a")]
    assert Counter(r.adapter for r in of_big)[0] == pytest.approx(3_000, abs=160)
    assert {r.prompt for r in of_small} == {"hello"}
    assert {r.adapter for r in of_small} == {None}
    hurried = [r.deadline_s for r in of_small if r.deadline_s]
    assert set(hurried) == {1.5}
    assert len(hurried) == pytest.approx(500, abs=80)
    leaving = Counter(r.cancel_after for r in of_small)
    assert set(leaving) == {None, 2, 3, 4}
    assert leaving[None] == pytest.approx(1_000, abs=90)


def test_every_process_draws_the_same_in_any_order() -> None:
    tenants = (Tenant("a", adapters=power_law(("x", "y"), 1.0), prompt_tokens=Uniform(1, 99)), Tenant("b"))
    one, other = Workload(plan(*tenants)), Workload(plan(*tenants))
    backwards = {index: other.request(index) for index in range(3_000, -1, -7)}
    assert all(one.request(index) == request for index, request in sorted(backwards.items()))
    changed = Workload(plan(*tenants, seed=2))
    assert any(changed.request(index) != one.request(index) for index in range(100))
    first, second = one.request(0), one.request(1)
    pool = range(5, 500)
    assert one.prompt_ids(first, pool) == other.prompt_ids(first, pool)
    assert one.prompt_ids(first, pool) != one.prompt_ids(second, pool)
    assert len(one.prompt_ids(first, pool)) == first.prompt_tokens
    assert set(one.prompt_ids(first, pool)) <= set(pool)


def test_every_process_draws_the_same_texts() -> None:
    pool = list(range(100, 200))
    of_ids, of_prompts = Tenant("ids", prompt_tokens=Fixed(5)), Tenant("prompts", prompts=("a", "b", "c"))
    for tenant in (of_ids, of_prompts):
        workload = Workload(plan(tenant))
        drawn = [workload.texts(workload.request(index), pool, 7) for index in range(20)]
        again = Workload(plan(tenant))
        assert [again.texts(again.request(index), pool, 7) for index in (19, 0)] == [drawn[19], drawn[0]]
        assert len({str(texts) for texts in drawn}) == 20
        assert {len(texts) for texts in drawn} == {7}
        texts = [text for texts in drawn for text in texts]
        if tenant is of_ids:
            assert {len(text) for text in texts} == {5}
            assert {one for text in texts for one in text} <= set(pool)
        else:
            assert set(texts) == {"a", "b", "c"}


def test_a_trace_says_what_it_says_and_leaves_the_rest_to_the_tenant() -> None:
    rows = (
        TraceRow(0.0, tenant="b", adapter="z", prompt="hi", answer_tokens=3),
        TraceRow(0.1, tenant="a", prompt_tokens=77),
        TraceRow(0.2, tenant="a", adapter="base"),
    )
    tenants = (Tenant("a", prompts=("drawn",), adapters=power_law(("x",), 0.0)), Tenant("b", answer_tokens=Fixed(8)))
    workload = Workload(plan(*tenants, trace=rows))
    first, second, third = (workload.request(index) for index in range(3))
    assert (first.tenant, first.prompt, first.answer_tokens) == (1, "hi", 3)
    assert workload.adapters[first.adapter or 0] == (1, "z")
    assert (second.tenant, second.prompt, second.prompt_tokens, second.answer_tokens) == (0, None, 77, 64)
    assert workload.adapters[second.adapter or 0] == (0, "x")
    assert (third.adapter, third.prompt) == (None, "drawn")
