"""bench.fairness in a few virtual seconds: its tables are complete, and fair claims do what they are for."""

from __future__ import annotations

import math

from bench.fairness import AIMS, SHARED, UNSHARED, measure
from bench.fairness_simulation import FairnessSetup, FairnessSimulation


def test_every_run_and_ratio_is_there() -> None:
    setup = FairnessSetup(minutes=0.25, prompt=64, answer=32, long_answer=100, quiet_rate=1.0)
    written = measure(setup, quick=True).to_json()
    runs = [(row["run"], row["tenant"]) for row in written["rows"]]
    assert runs == [
        *((run, tenant) for run in ("fair", "first come first served") for tenant in ("one", "two")),
        ("quiet alone", "quiet"),
        *(("quiet beside loud", tenant) for tenant in ("quiet", "loud")),
        *((run, tenant) for run in (SHARED, UNSHARED) for tenant in ("quiet", "long")),
    ]
    assert written["ratios"].keys() == written["aims"].keys() == AIMS.keys()
    assert all(math.isfinite(value) for value in written["ratios"].values())


def test_fair_claims_share_what_first_come_first_served_gives_to_the_loud_one() -> None:
    setup = FairnessSetup(minutes=0.5, rates={"one": 12.0, "two": 36.0}, prompt=64, answer=32, kv_tokens=1_000)
    answers = {
        fair: {
            tenant: len(times)
            for tenant, times in FairnessSimulation(setup, setup.rates, fair=fair).run().ttft_s.items()
        }
        for fair in (True, False)
    }
    assert abs(answers[True]["one"] - answers[True]["two"]) < 0.1 * answers[True]["one"]
    assert answers[False]["two"] > 2 * answers[False]["one"]
