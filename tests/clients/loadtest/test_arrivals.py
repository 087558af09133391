"""Test when requests come: the statistics of the draws, and that the seed alone decides them."""

from __future__ import annotations

import numpy as np
import pytest

from loraplex.loadtest.arrivals import Constant, Extent, Gamma, Open, Poisson, Ramp, Replay, Stage, arrival_times

MANY = Extent(requests=50_000)


def gaps(arrivals: Open, seed: int = 1) -> np.ndarray:
    times = arrival_times(arrivals, MANY, seed)
    assert len(times) == 50_000
    return np.diff(times, prepend=0.0)


# the deviation of a mean of n gaps is cv / sqrt(n) of it: 4 of them
@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_gaps_have_the_mean_and_the_variation_asked_for(cv: float) -> None:
    found = gaps(Gamma(20.0, cv))
    assert found.min() > 0 or cv > 1
    assert found.mean() == pytest.approx(1 / 20, rel=4 * cv / np.sqrt(50_000))
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.05)


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    times = arrival_times(Poisson(50.0), MANY, 2)
    counts = np.histogram(times, np.arange(0, times[-1]))[0]
    assert len(counts) > 900
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.2)


def test_constant_arrivals_do_not_drift() -> None:
    times = arrival_times(Constant(7.0), MANY, 1)
    assert times[0] == 0.0
    assert times[-1] == 49_999 / 7
    assert np.diff(times) == pytest.approx(1 / 7)


@pytest.mark.parametrize("arrivals", [Constant(40.0), Poisson(40.0), Gamma(40.0, 4.0)])
def test_a_duration_ends_them_and_the_warm_up_comes_on_top(arrivals: Open) -> None:
    short = arrival_times(arrivals, Extent(duration_s=10.0), 5)
    longer = arrival_times(arrivals, Extent(duration_s=10.0, warm_up_s=500.0), 5)
    assert len(short) > 50
    assert short[-1] < 10.0
    assert 500.0 < longer[-1] < 510.0
    assert np.array_equal(longer[: len(short)], short)
    counted = arrival_times(arrivals, Extent(requests=5_000, warm_up_requests=100), 5)
    assert len(counted) == 5_100


def test_a_ramp_comes_as_often_as_its_rate_says_at_each_time() -> None:
    ramp = Ramp((Stage(0.0, 100.0, 100.0), Stage(100.0, 100.0, 50.0), Stage(100.0, 20.0, 50.0)))
    times = arrival_times(ramp, Extent(), 3)
    assert np.all(np.diff(times) >= 0)
    assert 0 <= times[0] <= times[-1] <= 200.0
    # expected counts are areas below the rate; a Poisson count's deviation is its root: 4 of them
    for begin, end, expected in ((0, 50, 1250), (50, 100, 3750), (100, 150, 5000), (150, 200, 3000)):
        count = int(((times >= begin) & (times < end)).sum())
        assert count == pytest.approx(expected, abs=4 * expected**0.5)


def test_a_replay_is_the_trace() -> None:
    assert arrival_times(Replay((0.0, 0.5, 0.5, 2.0)), Extent(), 1).tolist() == [0.0, 0.5, 0.5, 2.0]


def test_the_seed_decides() -> None:
    assert np.array_equal(gaps(Poisson(9.0), seed=4), gaps(Poisson(9.0), seed=4))
    assert not np.array_equal(gaps(Poisson(9.0), seed=4), gaps(Poisson(9.0), seed=5))
