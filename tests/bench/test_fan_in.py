"""bench.fan_in with few links: its table is complete, and pacing bounds messages and waits."""

from __future__ import annotations

import math

from bench.fan_in import AIMS, PAGE, Setup, measure
from bench.fan_in_messages import Fleet, simulate
from bench.tables import rewrite

SMALL = Setup(Fleet(workers=20, routers=4, seconds=1.0), links=4, seconds=0.3, warm_s=0.1)


def test_every_case_and_ratio_is_there_and_has_a_place_on_the_page() -> None:
    written = measure(SMALL, quick=True).to_json()
    assert [row["messages"] for row in written["rows"]] == ["paced", "a message after each step"]
    assert all(math.isfinite(value) and value > 0 for row in written["rows"] for value in list(row.values())[2:4])
    assert written["ratios"].keys() == written["aims"].keys() == AIMS.keys()
    assert "a message after each step" in rewrite(PAGE.read_text(), written)


def test_the_interval_bounds_messages_and_waits_whatever_the_steps_are() -> None:
    for steps_per_s in (40.0, 200.0, 1000.0):
        fleet = Fleet(workers=5, routers=4, steps_per_s=steps_per_s, answer_tokens=2000, seconds=2.0)
        paced, unpaced = simulate(fleet, 50.0), simulate(fleet, 0.0)
        # 20 a second for each worker, and one for each first token and end.
        assert paced.messages_per_s <= 5 * (20 + 2 * 8 * steps_per_s / 2000 + 1)
        assert paced.longest_wait_ms <= 50.0 + 1e-6
        assert unpaced.messages_per_s > 0.9 * 5 * steps_per_s
        assert unpaced.longest_wait_ms == 0.0
        assert 0.8 < paced.tokens / unpaced.tokens < 1.25
