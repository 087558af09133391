"""bench.calls for a moment: real processes, every call of the burst ends with a reason, and the page has its place."""

from __future__ import annotations

import math

from bench.calls import AIMS, PAGE, Setup, measure
from bench.tables import rewrite


def test_every_case_and_ratio_is_there() -> None:
    setup = Setup(seconds=0.5, warm_s=0.1, burst=50, rounds=1, round_s=0.5, connections=16, side_by_side=8)
    written = measure(setup, quick=True).to_json()
    cases = ["8 side by side", "burst: OK", "burst", "one process", "two processes"]
    assert [row["case"] for row in written["rows"]] == cases
    assert written["ratios"].keys() == written["aims"].keys() == AIMS.keys()
    assert all(math.isfinite(value) for value in written["ratios"].values())
    assert written["ratios"]["burst_without_a_reason"] == 0
    assert rewrite(PAGE.read_text(), written)
