"""Homes by demand beside one home: `python -m bench.placement [--quick] [--json FILE]`.

A cluster of 1,000 workers and 100,000 adapters runs in virtual time: the queue's functions as they are shipped, and
broker.homes, as a router places jobs. The popularity of adapters follows Zipf's law. The same requests run with one
home an adapter, as before homes followed the demand. With --write-docs its figures go into docs/results/scaling.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from statistics import quantiles
from typing import Any

from bench.command import run_command
from bench.report import Aim, Report, progress
from bench.scaling import PAGE
from bench.scaling_cluster import Result, Scale, VirtualCluster
from loraplex.contracts.broker.terms import HOME_PERCENT

# Columns of the page.
_PAGE = ("run", "policy", "hit rate", "loads/s", "hot p99 ms", "median p99 ms")
AIMS = {
    "hit_rate": Aim(at_least=0.93),
    "hit_rate_one_home": Aim(),
    "hit_rate_of_the_best_slots": Aim(),
    "loads_over_one_home": Aim(),
    "hot_over_median_p99": Aim(at_most=2),
    "hot_over_median_p99_one_home": Aim(),
    "hot_over_median_p99_busy": Aim(at_most=2),
    "hot_over_median_p99_busy_one_home": Aim(),
}
BY_DEMAND, ONE_HOME = "homes by demand", "one home"
# The part of all requests, from the most popular adapter on, whose adapters are the median ones.
_MEDIAN = (0.45, 0.55)


@dataclass(frozen=True)
class Setup:
    """The cluster, a higher load at which it also runs, and the number of workers that join it in another run."""

    scale: Scale
    busy_load: float
    joining: int


FULL = Setup(
    Scale(workers=1_000, adapters=100_000, jobs=60_000, zipf=1.0, slots=64, answer=500, earlier=1_000_000),
    busy_load=0.85,
    joining=100,
)
QUICK = Setup(
    Scale(workers=20, adapters=2_000, jobs=4_000, zipf=1.0, slots=64, answer=500, earlier=20_000),
    busy_load=0.85,
    joining=2,
)


def main() -> None:
    """Run the benchmark with the command line's arguments; `--write-docs` writes its tables of the page."""
    run_command("placement", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick), PAGE)


def measure(setup: Setup, quick: bool) -> Report:
    """Run the clusters with both policies."""
    busy, joined = f"load {setup.busy_load:g}", f"{setup.joining} workers join"
    scales = {
        f"load {setup.scale.load:g}": setup.scale,
        busy: replace(setup.scale, load=setup.busy_load),
        joined: replace(setup.scale, joining=setup.joining),
    }
    results: dict[tuple[str, str], Result] = {}
    for name, scale in scales.items():
        for policy in (ONE_HOME, BY_DEMAND):
            progress(f"{name}, {policy}")
            results[name, policy] = VirtualCluster(replace(scale, by_demand=policy == BY_DEMAND)).run()
    first = next(iter(scales))
    ratios = {
        "hit_rate": results[first, BY_DEMAND].hit_rate,
        "hit_rate_one_home": results[first, ONE_HOME].hit_rate,
        "hit_rate_of_the_best_slots": sum(_shares(setup.scale)[: setup.scale.workers * setup.scale.slots]),
        "loads_over_one_home": results[first, BY_DEMAND].loads_per_s / results[first, ONE_HOME].loads_per_s,
    }
    for name, ending in ((first, ""), (busy, "_busy")):
        for policy, of in ((BY_DEMAND, ""), (ONE_HOME, "_one_home")):
            ratios[f"hot_over_median_p99{ending}{of}"] = _hot_over_median(scales[name], results[name, policy])
    rows = [_row(scales[name], name, policy, result) for (name, policy), result in results.items()]
    return Report(
        name="placement",
        command="python -m bench.placement" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup.scale) | {"busy_load": setup.busy_load, "joining": setup.joining},
        rows=rows,
        page_rows=[{key: row[key] for key in _PAGE} for row in rows],
        ratios=ratios,
        aims=AIMS,
    )


def _row(scale: Scale, name: str, policy: str, result: Result) -> dict[str, Any]:
    hot, median, waits = _hot(scale), _median(scale), [wait for waits in result.waits_ms.values() for wait in waits]
    return {
        "run": name,
        "policy": policy,
        "hit rate": result.hit_rate,
        "loads/s": result.loads_per_s,
        "of them before a job": result.warms / max(1, result.misses + result.firsts + result.warms),
        "jobs/s": len(waits) / result.seconds,
        "wait p99 ms": _p99(waits),
        "start p99 ms": _first_token_p99(scale, result, range(scale.adapters)),
        "hot p99 ms": _first_token_p99(scale, result, hot),
        "median p99 ms": _first_token_p99(scale, result, median),
    }


def _shares(scale: Scale) -> list[float]:
    """Return the adapters' shares of the requests, the largest first."""
    weights = [(number + 1) ** -scale.zipf for number in range(scale.adapters)]
    total = sum(weights)
    return [weight / total for weight in weights]


def _hot(scale: Scale) -> range:
    """Return the adapters whose requests take more rows of a worker than a home should have."""
    busy = scale.load * scale.workers
    return range(max(1, sum(share * busy > HOME_PERCENT / 100 for share in _shares(scale))))


def _median(scale: Scale) -> range:
    sums = list(accumulate(_shares(scale)))
    return range(*(sum(part < bound for part in sums) for bound in _MEDIAN))


def _hot_over_median(scale: Scale, result: Result) -> float:
    return _first_token_p99(scale, result, _hot(scale)) / _first_token_p99(scale, result, _median(scale))


def _first_token_p99(scale: Scale, result: Result, adapters: range) -> float:
    """Return the p99 of the time to the first token in ms: the wait, the adapter's load and one step."""
    starts: Mapping[int, list[float]] = result.starts_ms
    return scale.token_ms + _p99([start for number in adapters for start in starts.get(number, ())])


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


if __name__ == "__main__":
    main()
