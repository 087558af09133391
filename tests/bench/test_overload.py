"""bench.overload: its figures and its load, by their definitions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest

from bench.overload import Run, answers_per_s, report
from bench.overload_accounts import Count
from bench.overload_load import Sample, Setup, fair_share, within_share


def made_run(load: float, samples: Sequence[Sample], counted: int) -> Run:
    return Run(load, 10 * load, samples, Count(Counter(OK=counted), counted), (50.0, 60.0), (0.001,), {}, math.inf)


def answer(due_s: float, ended_s: float, code: str = "OK") -> Sample:
    return Sample(1, due_s, first_s=due_s + 0.1, ended_s=ended_s, tokens=10, code=code, reason="")


def test_the_report_counts_answers_in_time_and_calls_that_are_missing() -> None:
    setup = Setup((1, 20), seconds=2.0, warm_s=1.0, capacity_s=1.0, deadline_s=0.5)
    unloaded = made_run(0.3, [answer(1.0, 1.2)], 1)
    peak = made_run(1, [answer(0.5, 0.9), answer(1.0, 1.3), answer(1.2, 1.6), answer(1.5, 2.1)], 4)
    most = made_run(20, [answer(1.0, 1.2), answer(1.0, 1.6), answer(1.1, 1.2, "RESOURCE_EXHAUSTED")], 2)
    written = report(setup, True, 10.0, unloaded, [peak, most]).to_json()
    assert written["ratios"]["goodput_20x_of_peak"] == 0.5, "late ones are not counted"
    assert written["ratios"]["unaccounted_calls"] == 1
    assert written["ratios"]["quiet_ttft_p99_ratio"] == pytest.approx(5, rel=0.1), "a refusal counts as the deadline"
    assert [row["calls"] for row in written["rows"] if row["case"] == "20x: RESOURCE_EXHAUSTED"] == [1]
    nothing = made_run(1, [answer(1.0, 1.1, "UNAVAILABLE")], 1)
    assert math.isnan(report(setup, True, 10.0, unloaded, [nothing]).ratios["goodput_20x_of_peak"])


def test_the_capacity_is_of_the_second_half() -> None:
    samples = [answer(0.0, ended_s) for ended_s in (0.2, 1.1, 1.5, 2.0, 2.2)] + [answer(1.0, 1.2, "UNAVAILABLE")]
    assert answers_per_s(samples, 2.0) == 3
    with pytest.raises(RuntimeError, match="no answer in 2 s of the closed loop"):
        answers_per_s(samples[:1], 4.0)


def test_capacity_is_shared_so_that_none_has_more_than_it_asks() -> None:
    assert fair_share([1.0, 2.0, 3.0], 6.0) == math.inf
    assert fair_share([1.0, 2.0, 9.0], 9.0) == pytest.approx(6.0)
    assert fair_share([9.0, 1.0, 8.0], 9.0) == pytest.approx(4.0)


def test_calls_are_within_a_share_when_none_of_their_tenant_is_left() -> None:
    calls = [Sample(tenant, due_s) for tenant, due_s in ((1, 0.0), (1, 0.5), (2, 0.6), (1, 1.5), (2, 1.7), (1, 3.0))]
    assert [(s.tenant, s.due_s) for s in within_share(calls, 1.0)] == [(1, 0.0), (2, 0.6), (2, 1.7), (1, 3.0)]
    assert within_share(calls, math.inf) == sorted(calls, key=lambda sample: sample.due_s)


def test_a_skewed_load_has_tenants_within_their_share_at_twenty_times_the_capacity() -> None:
    setup = Setup((20,), 40.0, 10.0, 15.0)
    rates = setup.rates(20 * setup.possible_per_s)
    quiet = [rate for rate in rates if rate <= fair_share(rates, setup.possible_per_s)]
    assert sum(rates) == pytest.approx(20 * setup.possible_per_s)
    assert 0.3 < sum(quiet) / setup.possible_per_s < 0.7
