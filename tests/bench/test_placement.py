"""bench.placement with few workers: its tables are complete, and homes by demand do what they are for."""

from __future__ import annotations

import math
from dataclasses import replace

from bench.placement import AIMS, Setup, measure
from bench.scaling import PAGE
from bench.scaling_cluster import Scale, VirtualCluster
from bench.tables import rewrite

SMALL = Scale(workers=4, adapters=60, jobs=300, zipf=1.0, rows=8, slots=8, earlier=400)


def test_every_run_and_ratio_is_there_and_has_a_place_on_the_page() -> None:
    written = measure(Setup(replace(SMALL, jobs=60), busy_load=0.8, joining=1), quick=True).to_json()
    assert len(written["rows"]) == 6
    assert written["ratios"].keys() == written["aims"].keys() == AIMS.keys()
    assert all(math.isfinite(value) for value in written["ratios"].values())
    assert "homes by demand" in rewrite(PAGE.read_text(), written)


def test_workers_that_join_load_their_adapters_before_jobs_come() -> None:
    scale = replace(SMALL, jobs=600, joining=4)
    by_demand, one_home = (VirtualCluster(replace(scale, by_demand=by_demand)).run() for by_demand in (True, False))
    assert by_demand.warms > 0
    assert one_home.warms == 0
    assert by_demand.hit_rate > one_home.hit_rate
