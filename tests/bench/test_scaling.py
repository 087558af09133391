"""bench.scaling with few workers: its tables are complete, and the policy does what it is for."""

from __future__ import annotations

import math

from bench.scaling import AIMS, PAGE, Setup, measure
from bench.scaling_cluster import Scale, VirtualCluster
from bench.tables import rewrite

SMALL = Setup(
    workers=(2, 3),
    jobs=12,
    adapters=20,
    skewed_adapters=50,
    loads=(0.5, 0.9),
    calls=20,
    middle=3,
    few=2,
    flood=100,
    routers=5,
    accounts=500,
)


def test_every_run_and_ratio_is_there_and_has_a_place_on_the_page() -> None:
    written = measure(SMALL, quick=True).to_json()
    runs = [(row["run"], row["workers"]) for row in written["rows"] if "workers" in row]
    assert runs == [
        *(
            (run, workers)
            for workers in (2, 3)
            for run in ("rendezvous, uniform", "rendezvous, skewed", "first free worker, uniform")
        ),
        ("load 0.5", 3),
        ("load 0.9", 3),
        ("one of ten tenants sends half, load 1.1", 2),
        ("one of ten tenants sends half, load 3", 2),
    ]
    assert len([row for row in written["rows"] if row.get("us", 0) > 0]) == 7
    assert written["ratios"].keys() == written["aims"].keys() == AIMS.keys()
    assert all(math.isfinite(value) for value in written["ratios"].values())
    assert "rendezvous, skewed" in rewrite(PAGE.read_text(), written)


def test_jobs_meet_their_adapters_where_rendezvous_sends_them() -> None:
    hit_rates = {
        rendezvous: VirtualCluster(Scale(4, adapters=40, slots=12, jobs=400, rendezvous=rendezvous)).run().hit_rate
        for rendezvous in (True, False)
    }
    assert hit_rates[True] > 0.8
    assert hit_rates[False] < 0.4


def test_tenants_that_want_more_than_there_is_get_the_same() -> None:
    result = VirtualCluster(Scale(1, adapters=10, rows=8, jobs=1_000, load=3.0, tenants=4, loud=0.5)).run()
    others = [result.served[f"t{number}"] for number in range(1, 4)]
    assert 0.8 < result.served["t0"] / (sum(others) / 3) < 1.25


def test_a_run_is_the_same_again() -> None:
    scale = Scale(2, adapters=20, jobs=60)
    assert VirtualCluster(scale).run() == VirtualCluster(scale).run()
