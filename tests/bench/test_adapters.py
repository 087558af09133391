"""bench.adapters: the trace is the published one, a percentile its definition."""

from __future__ import annotations

import statistics

import numpy as np

from bench.adapter_loads import percentile
from bench.trace import Trace, draw


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
