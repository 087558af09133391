"""bench.router_forms: the costs of a call and of a token, a process's memory, and a place on the page."""

from __future__ import annotations

import os

from bench.calls import PAGE, Flow
from bench.router_forms import AIMS, FULL, costs_of, memory_mib
from bench.tables import rewrite


def test_a_token_costs_what_longer_answers_cost_more() -> None:
    short = Flow(1000, 1.0, {"router 1": 0.5, "router 2": 0.5})
    long = Flow(100, 1.0, {"router 1": 0.3, "supervisor": 0.1})
    assert costs_of([short, long], FULL) == {"call": 1000.0, "token": (4000.0 - 1000.0) / 100}


def test_shared_memory_counts_in_parts() -> None:
    rss, pss = memory_mib(os.getpid())
    assert rss >= pss > 1


def test_the_page_has_a_place_for_the_table() -> None:
    report = {
        "name": "router_forms", "command": "measured", "quick": False, "setup": {}, "rows": [{"form": "1 router"}],
        "ratios": dict.fromkeys(AIMS, 1.0), "aims": {name: str(aim) for name, aim in AIMS.items()},
        "machine": {"processor": "", "cores": 2, "threads": 2, "omp_wait_policy": "unset", "load_1_min": 0.0},
        "versions": {},
    }  # fmt: skip
    assert "`measured`" in rewrite(PAGE.read_text(), report)
