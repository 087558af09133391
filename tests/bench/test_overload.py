"""bench.overload for a moment: real processes, every call is accounted for, every row and ratio is there."""

from __future__ import annotations

import math

import pytest

from bench.overload import AIMS, measure
from bench.overload_load import Sample, Setup, fair_share, within_share


def test_every_call_is_accounted_for() -> None:
    setup = Setup(
        *((1, 4), 1.0, 0.2, 0.5),
        tenants=20,
        routers=1,
        workers=1,
        rows=4,
        step_ms=20.0,
        shortest=2,
        longest=4,
        deadline_s=1.0,
    )
    written = measure(setup, quick=True).to_json()
    loads = [row for row in written["rows"] if "metrics" in row]
    assert [row["case"] for row in loads] == ["0.3x", "1x", "4x"]
    assert all(row["client"] == row["routers"] == row["metrics"] > 0 for row in loads)
    refused = sum(row["client"] for row in written["rows"] if ": " in row["case"])
    assert sum(row["client"] - row["answered"] for row in loads) == refused
    assert written["ratios"].keys() == written["aims"].keys() == AIMS.keys()
    assert written["ratios"]["unaccounted_calls"] == 0
    assert math.isfinite(written["ratios"]["goodput_20x_of_peak"])


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
