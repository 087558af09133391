"""Prints the progress of a load test, its report as tables, and comparisons; chooses the exit code."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import typer

from clients.cli.terminal import (
    CommandError,
    err,
    print_error,
    print_json,
    print_rows,
    print_warning,
    printable,
    table_of,
)
from clients.loadtest.generator import Progress
from clients.loadtest.samples import LEFT, OK

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from clients.loadtest.conditions import Condition
    from clients.loadtest.plan import LoadPlan
    from clients.loadtest.runs import Done

_WAITING = "waiting for the generator processes"
# Interval of the progress lines in a pipe, in seconds.
_LINE_EVERY_S = 2.0


class Screen:
    """Shows the total progress of all generator processes on stderr; stdout is for the report."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._lined_s = time.monotonic()
        self._rate = (0.0, 0, 0.0)

    def __enter__(self) -> Self:
        if err().is_terminal:
            from rich.live import Live

            self._live = Live(console=err(), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, label: str, latest: Sequence[Progress]) -> None:
        """Show the latest progress of each process; none while they start."""
        if self._live is not None:
            self._live.update(self._table(label, latest) if latest else f"{label}: {_WAITING}", refresh=True)
        elif time.monotonic() - self._lined_s >= _LINE_EVERY_S:
            self._lined_s = time.monotonic()
            sys.stderr.write((_progress_line(label, latest) if latest else f"{label}: {_WAITING}") + "\n")

    def _table(self, label: str, latest: Sequence[Progress]) -> Table:
        ok, errors = _ended(latest)
        at_s, tokens = max(progress.at_s for progress in latest), sum(progress.tokens for progress in latest)
        last_at_s, last_tokens, rate = self._rate
        if at_s < last_at_s:  # A new run has begun.
            last_at_s, last_tokens = 0.0, 0
        if at_s - last_at_s > 1.0:
            rate = (tokens - last_tokens) / (at_s - last_at_s)
            self._rate = (at_s, tokens, rate)
        rows: list[tuple[object, ...]] = [
            ("sent", sum(progress.sent for progress in latest)),
            ("running", sum(progress.running for progress in latest)),
            ("answered", ok),
            ("errors", errors),
            ("tokens/s", f"{rate:.0f}"),
            ("TTFT ms, p50 p99", _recent([progress.recent_ttft_s for progress in latest])),
            ("ITL ms, p50 p99", _recent([progress.recent_gap_s for progress in latest])),
        ]
        table = table_of((f"{label}, {at_s:.0f} s", ""), rows)
        for status, count in sorted(_statuses(latest).items()):
            if status != OK:
                table.add_row(printable(status), str(count), style="yellow")
        return table


def _progress_line(label: str, latest: Sequence[Progress]) -> str:
    ok, errors = _ended(latest)
    return (
        f"{label}, {max(progress.at_s for progress in latest):.0f} s: "
        f"{sum(progress.sent for progress in latest)} sent, "
        f"{sum(progress.running for progress in latest)} running, {ok} answered, {errors} errors; "
        f"TTFT {_recent([progress.recent_ttft_s for progress in latest])} ms (p50, p99)"
    )


def _statuses(latest: Sequence[Progress]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for progress in latest:
        for status, count in progress.statuses.items():
            counts[status] = counts.get(status, 0) + count
    return counts


def _ended(latest: Sequence[Progress]) -> tuple[int, int]:
    counts = _statuses(latest)
    ok = counts.pop(OK, 0)
    counts.pop(LEFT, 0)
    return ok, sum(counts.values())


def _recent(parts: Sequence[Sequence[float]]) -> str:
    values = np.asarray([value for part in parts for value in part])
    if not len(values):
        return "-"
    middle, high = np.percentile(values, [50, 99]) * 1e3
    return f"{middle:.1f} {high:.1f}"


def finish(
    plan: LoadPlan, router: str, done: Done, conditions: Sequence[Condition], out: Path, *, as_json: bool
) -> None:
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


def print_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each run."""
    from clients.loadtest.report import milliseconds, percent

    columns = [("ttft", "p50"), ("ttft", "p99"), ("itl", "p50"), ("itl", "p99"), ("latency", "p50"), ("latency", "p99")]
    # A test of embed or classify makes no tokens.
    unit = "texts" if any(run["figures"]["texts"] for run in runs) else "tokens"
    heads = ("run", "requests", "errors", "requests/s", f"{unit}/s", "goodput", "cold")
    print_rows(
        (*heads, *(f"{'TTFT' if name == 'ttft' else 'ITL' if name == 'itl' else name} {p}" for name, p in columns)),
        [
            (
                run["label"],
                run["figures"]["requests"],
                run["figures"]["errors"],
                f"{run['figures']['requests_per_s']:.2f}",
                f"{run['figures'][f'{unit}_per_s']:.0f}",
                percent(run["figures"]["goodput_share"]),
                run["figures"]["cold"],
                *(milliseconds(run["times"][name][p]) for name, p in columns),
            )
            for run in runs
        ],
    )


def print_comparison(first: Path, second: Path, threshold: float | None, *, as_json: bool) -> None:
    """Print what changed between two reports, and on stderr which settings differ.

    Exits with 1 if something got worse by more than `threshold` percent. Raises PlanError if a file is not a report.
    """
    from clients.loadtest.compare import compare, differing, too_much_worse
    from clients.loadtest.report import read_report

    a, b = read_report(first), read_report(second)
    rows = compare(a, b)
    if as_json:
        print_json(rows)
    else:
        _print_changes(rows)
    for name, before, after in differing(a, b):
        print_warning(f"the settings differ: {name}: A {before or 'none'}, B {after or 'none'}")
    for name, report in (("A", a), ("B", b)):
        for run in report["runs"]:
            ended = [f"ended early: {run['ended_early']}"] if run["ended_early"] else []
            for line in (*ended, *run["warnings"]):
                print_warning(f"{name}, {run['label']}: {line}")
    worse = [] if threshold is None else too_much_worse(rows, threshold / 100)
    for row in worse:
        values = " to ".join(_value(row["value"], row[side]) for side in ("a", "b"))
        print_error(f"{row['run']}: {row['value']} got worse, from {values}: by more than {threshold:g}%")
    if worse:
        raise typer.Exit(1)


def _print_changes(rows: Sequence[Mapping[str, Any]]) -> None:
    print_rows(
        ("run", "value", "A", "B", "change", ""),
        [
            (
                row["run"],
                row["value"],
                _value(row["value"], row["a"]),
                _value(row["value"], row["b"]),
                "-" if row["change"] is None else f"{row['change'] * 100:+.1f}%",
                row["verdict"],
            )
            for row in rows
        ],
    )


def _value(name: str, value: float | None) -> str:
    """Format a time with its unit, a share as a percentage, a rate as a number."""
    from clients.loadtest.report import milliseconds, percent

    if name in {"requests", "errors"}:
        return f"{value or 0:.0f}"
    if "." in name:
        return f"{milliseconds(value)} ms"
    return percent(value) if name.endswith("_share") else f"{value or 0.0:.2f}"
