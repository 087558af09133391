"""The tables that `loraplex loadtest` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from clients.cli.terminal import print_error, print_json, print_rows, print_warning


def print_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each run."""
    from clients.loadtest.page import milliseconds, percent

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
    from clients.loadtest.compare import compare, too_much_worse
    from clients.loadtest.report import read_report
    from clients.loadtest.settings import differing

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
    from clients.loadtest.page import milliseconds, percent

    if name in {"requests", "errors"}:
        return f"{value or 0:.0f}"
    if "." in name:
        return f"{milliseconds(value)} ms"
    return percent(value) if name.endswith("_share") else f"{value or 0.0:.2f}"
