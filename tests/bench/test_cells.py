"""bench.cells with few jobs: its tables are complete, and both servers have a part of the jobs."""

from __future__ import annotations

from bench.cells import AIMS, Setup, measure
from bench.scaling import PAGE
from bench.tables import rewrite

SMALL = Setup(jobs=64, waiting=16, looks=2, adapters=20, callers=2, workers=2, passes=1, choices=40)


def test_every_run_and_ratio_is_there_and_has_a_place_on_the_page() -> None:
    written = measure(SMALL, quick=True).to_json()
    assert [(row["run"], row["cells"]) for row in written["rows"]] == [
        *(("jobs", 1), ("jobs", 2)),
        *(("a choice", cells) for cells in (1, 2, 4, 8)),
    ]
    two = written["rows"][1]
    assert 0 < two["us of the busiest server a job"] < two["us of all servers a job"]
    assert written["ratios"].keys() == written["aims"].keys() == AIMS.keys()
    assert "us of the busiest server" in rewrite(PAGE.read_text(), written)
