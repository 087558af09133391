"""bench.adapters on a model that takes milliseconds: every case and ratio is there; the trace is the published one."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from bench.adapter_loads import percentile
from bench.adapters import AIMS, Setup, measure
from bench.ceilings import CeilingSize
from bench.models import TINY
from bench.trace import Trace, draw


@pytest.mark.model
def test_every_case_and_ratio_is_there() -> None:
    setup = Setup(
        TINY,
        counts=(5, 24),
        slots=8,
        rows=8,
        in_flight=16,
        lengths=(4, 8),
        rounds=1,
        requests=24,
        open_s=0.2,
        decoding_s=0.3,
        lone=2,
        lone_store=3,
        swaps=20,
        warm_up_swaps=20,
        ceilings=CeilingSize(weights_bytes=1, rows=4),
    )
    report = measure(setup, quick=True)
    report.show()
    written = report.to_json()
    assert written["ratios"].keys() == written["aims"].keys() == AIMS.keys()
    growth = written["ratios"].pop("rss_growth_mb")
    assert math.isfinite(growth)
    assert all(math.isfinite(value) and value > 0 for value in written["ratios"].values())
    cases = [row["case"] for row in written["rows"]]
    assert len(cases) == len(set(cases)) == 2 + 3 + 2 + 2 + 5 + 2
    for row in written["rows"]:
        assert 0 < row["low"] <= row["median"] <= row["high"] < math.inf
    few, many = written["rows"][:2]
    assert few["swaps a request"] < many["swaps a request"], "24 adapters on 8 slots are swapped"


def test_the_trace_is_drawn_in_the_published_order() -> None:
    trace = Trace(adapters=10, requests=50, lengths=(8, 64), alpha=0.5, rate=4.0, cv=2.0)
    arrivals = draw(trace, vocabulary=100, prompts=1)
    np.random.seed(42)
    adapters = [int(10 * share) for share in np.random.power(0.5, 50)]
    prompts, answers = np.random.randint(8, 64, 50), np.random.randint(8, 64, 50)
    gaps = np.random.gamma(1 / 4, 4 / 4.0, 50)
    assert [one.request.adapter for one in arrivals] == adapters
    assert [len(one.request.prompt_ids) for one in arrivals] == list(prompts)
    assert [one.request.tokens for one in arrivals] == list(answers)
    assert [one.at_s for one in arrivals] == list(np.cumsum(gaps))
    # Another run asks the same of other prompts.
    again = draw(trace, vocabulary=100, prompts=2)
    assert [one.at_s for one in again] == [one.at_s for one in arrivals]
    assert all(one.request.prompt_ids != other.request.prompt_ids for one, other in zip(arrivals, again, strict=True))


def test_a_percentile_is_a_value_that_so_many_do_not_exceed() -> None:
    values = list(range(1, 101))
    assert (percentile(values, 99), percentile(values[::-1], 50)) == (100, 51)
    assert percentile([3.0], 99) == 3.0
    assert percentile(values, 0) == 1
    assert abs(percentile(values, 50) - statistics.median(values)) < 1
