"""Clusters of growing size: `python -m bench.scaling [--quick] [--json FILE]`.

Clusters of up to 1,000 workers and 100,000 adapters run in virtual time and show how often a job's worker has its
adapter, how long jobs wait, how service is shared, and how often workers claim. The cost of a claim is measured on a
real Valkey and gives the number of workers that a cell serves; so is that of many routers' looks at all workers, and
the time for which they wait for a ledger that has lost its data. With --write-docs its figures and plots go into
docs/results/scaling.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.command import run_command
from bench.plots import PLOTS, Panel, draw
from bench.report import Aim, Report, progress
from bench.scaling_cluster import REPORT_MS, Result, Scale, VirtualCluster
from bench.scaling_ledger import measure_recovery
from bench.scaling_redis import (
    CHARGE,
    CLAIM,
    CLAIM_8,
    EMPTY_CLAIM,
    ENQUEUE,
    FULL_CLAIM,
    WAITING,
    measure_costs,
    measure_looks,
)

AIMS = {
    "hit_rate_100_workers": Aim(at_least=0.9),
    "first_free_hit_rate_100_workers": Aim(),
    "hit_rate_when_full": Aim(),
    "quiet_p99_wait_ms_beside_loud": Aim(at_most=500),
    "loud_over_others_service": Aim(at_most=1.1),
    "claims_per_s_of_a_redis_core": Aim(),
    "jobs_per_s_of_one_cell": Aim(at_least=3_000),
    "workers_of_one_cell": Aim(),
    "cores_of_looks": Aim(at_most=0.1),
    "recovery_s": Aim(at_most=5),
}
PAGE = Path(__file__).parents[1] / "docs" / "results" / "scaling.md"
# Maximum share of a core that a cell's Redis should use, so that it has reserves for bursts.
_CORE_SHARE = 0.7
# Queries a second by each router, as in loraplex.router.dispatch.dispatcher and catalog.models, and number of routers.
_WATCHES_PER_S, _LOOKS_PER_S, ROUTERS = 4, 2, 4


@dataclass(frozen=True)
class Setup:
    """The sizes of the clusters in `workers`, with adapters and jobs for each worker; `calls` times each script runs.

    Clusters of more than 100 workers run half as many jobs for each worker, because they take longest to simulate.
    """

    workers: Sequence[int]
    jobs: int
    adapters: int
    skewed_adapters: int
    loads: Sequence[float]
    calls: int
    # Workers of the runs about load; workers and jobs of the runs about fairness.
    middle: int = 100
    few: int = 20
    flood: int = 24_000
    # Routers that look at all workers and renew their reservations; accounts in the store when Redis loses the ledger.
    routers: int = 100
    accounts: int = 50_000


FULL = Setup(
    workers=(10, 30, 100, 300, 1000),
    jobs=200,
    adapters=20,
    skewed_adapters=100,
    loads=(0.5, 0.7, 0.8, 0.9, 0.95),
    calls=3000,
)
QUICK = Setup(
    workers=(10, 20),
    jobs=80,
    adapters=20,
    skewed_adapters=100,
    loads=(0.5, 0.9),
    calls=200,
    middle=20,
    few=5,
    flood=3_000,
    accounts=2_000,
)
_UNIFORM, _SKEWED, _FIRST_FREE = "rendezvous, uniform", "rendezvous, skewed", "first free worker, uniform"
# Skew of the adapters' popularity, as in the published trace.
_SKEW = 0.3


@dataclass(frozen=True)
class Run:
    """A virtual cluster's run and its result."""

    name: str
    scale: Scale
    result: Result

    def wait_ms(self, quantile: int, tenants: Sequence[str] = ()) -> float:
        """Return the `quantile`-th percentile of the waits of all tenants, or of some."""
        waits = [
            wait for tenant, waits in self.result.waits_ms.items() if not tenants or tenant in tenants for wait in waits
        ]
        return quantiles(waits, n=100, method="inclusive")[quantile - 1]


def main() -> None:
    """Run the benchmark with the command line's arguments; `--write-docs` writes its tables of the page."""
    run_command("scaling", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick), PAGE)


def measure(setup: Setup, quick: bool) -> Report:
    """Simulate all clusters, and measure the scripts on a real server."""
    sizes = [run for workers in setup.workers for run in _size(setup, workers)]
    loads = [_run(f"load {load:g}", replace(_scale(setup, setup.middle), load=load)) for load in setup.loads]
    ten = replace(_scale(setup, setup.few), jobs=setup.flood, loud=0.5, tenants=10)
    # At load 1.1 the nine quiet tenants ask for less than their share, at load 3 for more.
    loud = _run("one of ten tenants sends half, load 1.1", replace(ten, load=1.1))
    flood = _run("one of ten tenants sends half, load 3", replace(ten, load=3.0))
    progress("timing the scripts on a real server")
    costs = measure_costs(setup.calls)
    looks = measure_looks(max(setup.workers), setup.routers)
    progress("wiping the ledger")
    recovery_s = measure_recovery(setup.accounts, setup.routers)
    by_size = {run.scale.workers: run for run in sizes if run.name == _UNIFORM}
    share = {workers: _core_share(run, costs) for workers, run in by_size.items()}
    at_100 = {run.name: run for run in sizes if run.scale.workers == max(s for s in setup.workers if s <= 100)}
    quiet = [f"t{number}" for number in range(1, loud.scale.tenants)]
    largest = max(share)
    scripts = [{"run": f"Redis: {name}", "us": us} for name, us in costs.items()]
    cores = [{"run": f"{kind} of {setup.routers} routers", "cores": used} for kind, used in looks.items()]
    return Report(
        name="scaling",
        command="python -m bench.scaling" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup),
        rows=[
            *map(_row, (*sizes, *loads, loud, flood)),
            *scripts,
            *({"run": f"Redis at {workers} workers", "cores": used} for workers, used in share.items()),
            *cores,
        ],
        page_rows=[
            *(_page_row(sizes, workers) | {"cores of Redis": used} for workers, used in share.items()),
            *scripts,
            *cores,
        ],
        ratios={
            "hit_rate_100_workers": at_100[_UNIFORM].result.hit_rate,
            "first_free_hit_rate_100_workers": at_100[_FIRST_FREE].result.hit_rate,
            "hit_rate_when_full": loads[-1].result.hit_rate,
            "quiet_p99_wait_ms_beside_loud": loud.wait_ms(99, quiet),
            "loud_over_others_service": flood.result.served["t0"]
            / median(flood.result.served[tenant] for tenant in quiet),
            "claims_per_s_of_a_redis_core": 1e6 / costs[CLAIM],
            "jobs_per_s_of_one_cell": _CORE_SHARE / share[largest] * _row(by_size[largest])["jobs/s"],
            "workers_of_one_cell": _CORE_SHARE / share[largest] * largest,
            "cores_of_looks": sum(looks.values()),
            "recovery_s": recovery_s,
        },
        aims=AIMS,
        draw=lambda: _plot(sizes, loads, share),
    )


def _scale(setup: Setup, workers: int) -> Scale:
    jobs = setup.jobs if workers <= 100 else setup.jobs // 2
    return Scale(workers=workers, adapters=setup.adapters * workers, jobs=jobs * workers)


def _size(setup: Setup, workers: int) -> list[Run]:
    scale = _scale(setup, workers)
    skewed = replace(scale, adapters=setup.skewed_adapters * workers, skew=_SKEW)
    return [
        _run(_UNIFORM, scale),
        _run(_SKEWED, skewed),
        _run(_FIRST_FREE, replace(scale, rendezvous=False)),
    ]


def _run(name: str, scale: Scale) -> Run:
    progress(f"{name}: {scale.workers} workers, {scale.adapters} adapters, {scale.jobs} jobs")
    return Run(name, scale, VirtualCluster(scale).run())


def _core_share(run: Run, costs: Mapping[str, float]) -> float:
    """Return the cores that a cluster's Redis uses for claims, enqueues, workers' beats and routers' queries."""
    result, scale = run.result, run.scale
    jobs, taking = scale.jobs / 2, result.claims - result.empty_claims - result.full_claims
    claims_us = taking * costs[CLAIM] + (jobs - taking) * (costs[CLAIM_8] - costs[CLAIM]) / 7
    claims_us += result.empty_claims * costs[EMPTY_CLAIM] + result.full_claims * costs[FULL_CLAIM]
    # Each job is enqueued once and charged once at its end; every worker also charges what its jobs have made.
    jobs_us = claims_us + jobs * (costs[ENQUEUE] + costs[CHARGE] / 16)
    beats_us = scale.workers * 1e3 / REPORT_MS * costs[CHARGE]
    looks_us = ROUTERS * (_WATCHES_PER_S + _LOOKS_PER_S) * costs[WAITING]
    return (jobs_us / result.seconds + beats_us + looks_us) / 1e6


def _row(run: Run) -> dict[str, Any]:
    scale, result = run.scale, run.result
    return {
        "run": run.name,
        "workers": scale.workers,
        "adapters": scale.adapters,
        "hit rate": result.hit_rate,
        "wait p50 ms": run.wait_ms(50),
        "wait p99 ms": run.wait_ms(99),
        "jobs/s": scale.jobs / 2 / result.seconds,
        "claims/s": result.claims / result.seconds,
        "of them empty": result.empty_claims / result.claims,
        "of them full": result.full_claims / result.claims,
    }


def _page_row(sizes: Sequence[Run], workers: int) -> dict[str, Any]:
    """Return the hit rates of a size as one row."""
    return {"hit rate with workers": workers} | {r.name: r.result.hit_rate for r in sizes if r.scale.workers == workers}


def _plot(sizes: Sequence[Run], loads: Sequence[Run], share: Mapping[int, float]) -> None:
    def line(name: str, value: str) -> list[tuple[float, float]]:
        return [(run.scale.workers, _row(run)[value]) for run in sizes if run.name == name]

    names = (_UNIFORM, _SKEWED, _FIRST_FREE)
    hits = Panel(
        "adapter there when claimed",
        "workers",
        "hit rate",
        {name: line(name, "hit rate") for name in names},
        logarithmic=False,
    )
    waits = Panel(
        "wait in the queue, p99",
        "workers",
        "ms",
        {name: line(name, "wait p99 ms") for name in names},
        logarithmic=False,
    )
    draw([hits, waits], PLOTS / "scaling_adapters.svg")
    claims = Panel("claims", "workers", "claims/s", {"claims/s": line(_UNIFORM, "claims/s")})
    cores = Panel("one cell's Redis", "workers", "cores", {"cores": list(share.items())})
    wait = Panel(
        "wait at 100 workers, p99",
        "load",
        "ms",
        {"p99": [(run.scale.load, run.wait_ms(99)) for run in loads]},
        logarithmic=False,
    )
    draw([claims, cores, wait], PLOTS / "scaling_redis.svg")


if __name__ == "__main__":
    main()
