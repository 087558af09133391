"""Fair claims beside first-come-first-served, in virtual time: `python -m bench.fairness [--quick] [--json FILE]`.

The queue is the real one, on a Redis in this process; the engine is the real scheduler with a KV cache of 10,000
tokens; a step takes 40 ms and 0.1 ms more for each token. The two tenants ask for more than the engine can serve.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import median, quantiles
from typing import Any

from bench.command import run_command
from bench.fairness_simulation import FairnessRun, FairnessSetup, FairnessSimulation
from bench.report import Aim, Report, progress
from loraplex.contracts.broker.terms import OUTPUT_WEIGHT, PROMPT_WEIGHT

AIMS = {
    "service_difference_over_bound": Aim(at_most=1),
    "fair_over_fcfs": Aim(at_least=0.97),
    "quiet_tenant_turnovers": Aim(at_most=2),
    # Beside a tenant whose long answers hold all rows: the quiet tenant's ttft with shared rows over that without, and
    # what sharing costs.
    "shared_over_unshared_ttft_p99": Aim(at_most=0.2),
    "shared_over_unshared_tokens": Aim(at_least=0.97),
}

SHARED, UNSHARED = "quiet beside long answers", "the same, rows not shared"

FULL = FairnessSetup(minutes=6)
QUICK = FairnessSetup(minutes=1)


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    run_command("fairness", __doc__ or "", lambda quick: measure(QUICK if quick else FULL, quick))


def measure(setup: FairnessSetup, quick: bool) -> Report:
    """Run the six simulations and report them."""
    runs: dict[str, FairnessRun] = {}
    for name, fair in (("fair", True), ("first come first served", False)):
        progress(name)
        runs[name] = FairnessSimulation(setup, setup.rates, fair=fair).run()
    fair_run, fcfs = runs["fair"], runs["first come first served"]
    capacity = fair_run.tokens_per_s / (setup.prompt + setup.answer)
    loud = {"loud": setup.loud_times_share * capacity / 2}
    for name, rates in (("quiet alone", {}), ("quiet beside loud", loud)):
        progress(name)
        runs[name] = FairnessSimulation(setup, {"quiet": setup.quiet_rate, **rates}, fair=True).run()
    long_setup = replace(setup, kv_tokens=setup.long_kv_tokens)
    for name, shared in ((SHARED, True), (UNSHARED, False)):
        progress(name)
        rates = {"quiet": setup.quiet_rate, "long": setup.long_rate}
        runs[name] = FairnessSimulation(long_setup, rates, fair=True, shared=shared).run()
    beside = runs["quiet beside loud"]
    waited_s = _p99(beside.ttft_s["quiet"]) - _p99(runs["quiet alone"].ttft_s["quiet"])
    bound = 2 * max(PROMPT_WEIGHT * setup.prompt, OUTPUT_WEIGHT * setup.kv_tokens)
    rows = [row for name, run in runs.items() for row in _rows(name, run)]
    return Report(
        name="fairness",
        command="python -m bench.fairness" + (" --quick" if quick else ""),
        quick=quick,
        setup=asdict(setup),
        rows=rows,
        page_rows=[],
        ratios={
            "service_difference_over_bound": fair_run.difference / bound,
            "fair_over_fcfs": fair_run.tokens_per_s / fcfs.tokens_per_s,
            "quiet_tenant_turnovers": waited_s / beside.turnover_s,
            "shared_over_unshared_ttft_p99": _p99(runs[SHARED].ttft_s["quiet"]) / _p99(runs[UNSHARED].ttft_s["quiet"]),
            "shared_over_unshared_tokens": runs[SHARED].tokens_per_s / runs[UNSHARED].tokens_per_s,
        },
        aims=AIMS,
    )


def _p99(values: tuple[float, ...]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


def _rows(name: str, run: FairnessRun) -> list[dict[str, Any]]:
    return [
        {
            "run": name,
            "tenant": tenant,
            "answers": len(times),
            "ttft p50 s": median(times),
            "ttft p99 s": _p99(times),
            "all tokens/s": run.tokens_per_s,
            "service difference": run.difference,
            "slot held s": run.turnover_s,
        }
        for tenant, times in run.ttft_s.items()
    ]


if __name__ == "__main__":
    main()
