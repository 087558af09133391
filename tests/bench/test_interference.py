"""bench.interference on a tiny model: what it reports is complete. No times."""

from __future__ import annotations

import math

import pytest

from bench.interference import AIMS, Setup, measure
from bench.models import TINY


@pytest.mark.model
def test_every_repeat_and_ratio_is_there() -> None:
    report = measure(Setup(TINY, repeats=2, decodes=3, decodes_prompt=8, prompt=1200, calm_gaps=3), quick=True)
    written = report.to_json()
    assert [row["repeat"] for row in written["rows"]] == [1, 2]
    # Its chunks leave room for the decodes in every step.
    assert all(row["prefill steps"] >= 3 for row in written["rows"])
    assert written["ratios"].keys() == written["aims"].keys() == AIMS.keys()
    assert all(math.isfinite(value) and value > 0 for value in written["ratios"].values())
