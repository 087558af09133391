"""bench.engine on a model that takes milliseconds: every row and ratio is there and is a number. No times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.ceilings import CeilingSize
from bench.engine import AIMS, Setup, measure
from bench.models import TINY
from bench.workload import Workload


@pytest.mark.model
def test_every_row_and_ratio_is_there(tmp_path: Path) -> None:
    workload = Workload(requests=8, prompt=12, short=2, long=6)
    report = measure(Setup(TINY, workload, rounds=1, ceilings=CeilingSize(weights_bytes=1, rows=4)), quick=True)
    report.show()
    report.write(tmp_path / "engine.json")
    written = json.loads((tmp_path / "engine.json").read_text())
    assert {"name", "machine", "versions", "rows", "ratios", "aims", "quick", "setup", "command"} <= written.keys()
    assert written["name"] == "engine"
    assert written["quick"] is True
    assert written["setup"]["shape"]["name"] == "tiny"
    assert written["ratios"].keys() == written["aims"].keys() == AIMS.keys()
    assert all(math.isfinite(value) and value > 0 for value in written["ratios"].values())
    assert len(written["rows"]) == 11
    for row in written["rows"]:
        assert 0 < row["low"] <= row["median"] <= row["high"] < math.inf
    assert list(tmp_path.iterdir()) == [tmp_path / "engine.json"]
