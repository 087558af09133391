"""More adapters in use than slots: throughput bends and does not break, and nobody is passed over for ever."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from loraplex.worker.engine.scheduling.adapter_slots import PASSED_OVER_MOST
from tests.worker.engine.scheduling.cliff_simulation import (
    IN_FLIGHT,
    INSTALL,
    MEAN_TOKENS,
    ROWS,
    SLOTS,
    Result,
    Simulation,
)

SEED = 7
REQUESTS = 900
ANSWERED = REQUESTS - REQUESTS // 3


def uniform(active: int) -> Callable[[random.Random], str]:
    return lambda chance: f"adapter {chance.randrange(active)}"


def run(active: int, in_flight: int = IN_FLIGHT) -> Result:
    result = Simulation(SEED, REQUESTS, uniform(active), in_flight=in_flight).run()
    waits = sorted(result.waits)
    print(
        f"seed {SEED}, {active / SLOTS:5.2f} adapters a slot: {result.tokens_per_step:5.2f} tokens a step, wait "
        f"p50 {statistics.median(waits):5.1f} p99 {waits[int(0.99 * len(waits))]:5.1f} steps, {result.swaps} swaps, "
        f"passed over at most {result.passed_over_most} times"
    )
    assert result.unserved == 0
    assert result.passed_over_most <= PASSED_OVER_MOST
    return result


def test_throughput_bends_with_the_adapters_in_use() -> None:
    results = {active: run(active) for active in (8, 16, 128, 1000)}
    base = results[16]
    for active, result in results.items():
        # Rate if swaps cost the steps' time and nothing else: most of it is left.
        swap_steps_a_token = INSTALL * result.swaps / (ANSWERED * MEAN_TOKENS)
        assert result.tokens_per_step >= 0.93 / (1 / base.tokens_per_step + swap_steps_a_token)
        assert (result.swaps > 0) == (active > SLOTS)
    # Four times as many as slots, and a swap for most of the requests.
    assert results[128].swaps > ANSWERED / 2
    assert results[128].tokens_per_step >= 0.9 * base.tokens_per_step
    assert results[1000].tokens_per_step >= 0.85 * base.tokens_per_step
    # With 64 in flight on 32 rows one waits for the turnover of a row whatever the adapters do.
    for result in results.values():
        assert statistics.median(result.waits) <= 1.25 * statistics.median(base.waits)
        assert max(result.waits) <= 2.5 * max(base.waits)


def test_at_half_the_load_the_first_token_comes_as_soon() -> None:
    fits, twice = run(16, ROWS // 2), run(64, ROWS // 2)
    assert twice.swaps > 0
    assert statistics.median(twice.waits) <= 2 * statistics.median(fits.waits)


@pytest.mark.parametrize("slots", [pytest.param(2, marks=pytest.mark.nightly), 8])
def test_busy_adapters_do_not_keep_the_others_out(slots: int) -> None:
    """So many adapters as there are slots take nearly all requests, and their rows overlap without end."""

    def mostly_hot(chance: random.Random) -> str:
        return f"hot {chance.randrange(slots)}" if chance.random() < 0.95 else f"cold {chance.randrange(50)}"

    simulation = Simulation(SEED, 600, mostly_hot, slots=slots)
    result = simulation.run()
    cold = [asked.passed_over for asked in simulation.asked if asked.digest.startswith("cold")]
    print(f"seed {SEED}, {slots} slots: passed over {sorted(cold)}")
    assert result.unserved == 0
    assert result.passed_over_most <= PASSED_OVER_MOST
    # They were passed over indeed: those whose adapter is there go first.
    assert max(cold) > PASSED_OVER_MOST // 4
