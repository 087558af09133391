"""Runs all points of a plan's sweep, even if the cluster fails meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from loraplex_client import Client

from clients.loadtest.fleet import Fleet, Target
from clients.loadtest.generator import Progress
from clients.loadtest.plan import Plan
from clients.loadtest.report import run_report
from clients.loadtest.samples import Samples
from clients.loadtest.workload import WORDS

# Timeout in seconds of the calls before the test.
_ASK_S = 10.0


@dataclass(frozen=True)
class Done:
    """Reports of the finished runs, each with its samples."""

    runs: tuple[dict[str, Any], ...]
    samples: tuple[tuple[str, Samples], ...]


def prompt_pool(plan: Plan, router: str) -> tuple[int, ...]:
    """Ask the router for token ids to build prompts from, which also checks that it answers.

    Raises LoraplexError, also for a bad tenant name.
    """
    for tenant in plan.tenants:
        Client(router, tenant.name).close()
    with Client(router, plan.tenants[0].name, timeout_s=_ASK_S) as client:
        return tuple(dict.fromkeys(client.tokenize(WORDS, model=plan.model)))


def run_all(
    plan: Plan,
    target: Target,
    pool: Sequence[int],
    on_progress: Callable[[str, Sequence[Progress]], None],
) -> Done:
    """Run every point of the plan until a run ends early. `on_progress` gets the run's label.

    Raises GeneratorDiedError.
    """
    runs: list[dict[str, Any]] = []
    samples: list[tuple[str, Samples]] = []
    with Fleet(target, pool, plan.processes) as fleet:
        for label, point in plan.points():
            run = fleet.run(point, partial(on_progress, label))
            report, seen = run_report(label, point, run)
            runs.append(report)
            samples.append((label, seen))
            if report["ended_early"]:
                break
    return Done(tuple(runs), tuple(samples))
