"""The end of `loraplex loadtest`: the report's files, its table, and the exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clients.cli.loadtest_tables import print_runs
from clients.cli.terminal import CommandError, err, print_error, print_json, print_warning

if TYPE_CHECKING:
    from clients.loadtest.conditions import Condition
    from clients.loadtest.plan import Plan
    from clients.loadtest.runs import Done


def finish(plan: Plan, router: str, done: Done, conditions: Sequence[Condition], out: Path, *, as_json: bool) -> None:
    """Write and print the report. Exits with 1 if a condition holds, a run had no success, or the test ended early."""
    from clients.loadtest.report import PAGE_NAME, whole_report, write

    command = shlex.join(["loraplex", *sys.argv[1:]])
    report = whole_report(plan, router, command, done.runs)
    write(out, report, done.samples, plan)
    if as_json:
        print_json(report)
    else:
        print_runs(done.runs)
    for run in done.runs:
        for line in (*run["warnings"], *_first_errors(run)):
            print_warning(f"{run['label']}: {line}")
    err().print(f"report: {out / PAGE_NAME}", style="dim", markup=False, soft_wrap=True)
    failed = [line for run in done.runs for line in failures(run, conditions)]
    for line in failed:
        print_error(line)
    last = done.runs[-1]
    if last["ended_early"] == "interrupted":
        raise typer.Exit(130)
    if last["ended_early"]:
        raise CommandError(f"{last['label']}: {last['ended_early']}; {last['accounting']['never_sent']} never sent", 1)
    if failed:
        raise typer.Exit(1)


def _first_errors(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the first error of each status, with the number of requests that ended so."""
    for status, message in run["messages"].items():
        yield f"{status} ({run['statuses'][status]}): {message}"


def failures(run: Mapping[str, Any], conditions: Sequence[Condition]) -> Iterator[str]:
    """Yield the reasons why a run fails the test."""
    figures = run["figures"]
    if not figures["ok"] and not figures["cancelled"]:
        yield f"{run['label']}: none of {figures['requests']} requests succeeded"
    for condition in conditions:
        if condition.holds(run):
            yield f"{run['label']}: {condition.describe(run)}, which fails {condition.text}"
