"""Runs a plan from beginning to end, every point of its sweep, whatever happens to the cluster meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from loraplex_client import Client

from clients.loadtest.fleet import Fleet
from clients.loadtest.generator import Progress
from clients.loadtest.plan import Plan
from clients.loadtest.report import run_report
from clients.loadtest.samples import Samples
from clients.loadtest.workload import WORDS

# For an answer to what is asked before the test.
_ASK_S = 10.0


@dataclass(frozen=True)
class Done:
    """The reports of the runs that took place, each with its samples."""

    runs: tuple[dict[str, Any], ...]
    samples: tuple[tuple[str, Samples], ...]


def prompt_pool(plan: Plan, router: str) -> tuple[int, ...]:
    """Ask the router for token ids to make prompts of; this is also how one learns that it is there.

    Raises LoraplexError, for a tenant's name too.
    """
    for tenant in plan.tenants:
        Client(router, tenant.name).close()
    with Client(router, plan.tenants[0].name, timeout_s=_ASK_S) as client:
        return tuple(dict.fromkeys(client.tokenize(WORDS, model=plan.model)))


def run_all(
    plan: Plan,
    router: str,
    pool: Sequence[int],
    on_progress: Callable[[str, Sequence[Progress]], None],
) -> Done:
    """Every run of the plan; none after one that ended early. `on_progress` gets the run's label.

    Raises GeneratorDiedError.
    """
    runs: list[dict[str, Any]] = []
    samples: list[tuple[str, Samples]] = []
    with Fleet(router, pool, plan.processes) as fleet:
        for label, point in plan.points():
            run = fleet.run(point, partial(on_progress, label))
            report, seen = run_report(label, point, run)
            runs.append(report)
            samples.append((label, seen))
            if report["ended_early"]:
                break
    return Done(tuple(runs), tuple(samples))
