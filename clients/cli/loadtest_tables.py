"""The tables that `loraplex loadtest` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clients.cli.terminal import print_json, print_rows


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


def print_comparison(first: Path, second: Path, *, as_json: bool) -> None:
    """Print what changed between two reports. Raises PlanError if a file is not a report."""
    from clients.loadtest.compare import compare
    from clients.loadtest.report import read_report

    rows = compare(read_report(first), read_report(second))
    if as_json:
        print_json(rows)
        return
    words = {True: "better", False: "worse", None: ""}
    print_rows(
        ("run", "value", "A", "B", "change", ""),
        [
            (
                row["run"],
                row["value"],
                _value(row["value"], row["a"]),
                _value(row["value"], row["b"]),
                "-" if row["change"] is None else f"{row['change'] * 100:+.1f}%",
                words[row["better"]],
            )
            for row in rows
        ],
    )


def _value(name: str, value: float | None) -> str:
    """Format a time with its unit, a share as a percentage, a rate as a number."""
    from clients.loadtest.page import milliseconds, percent

    if "." in name:
        return f"{milliseconds(value)} ms"
    return percent(value) if name.endswith("_share") else f"{value or 0.0:.2f}"
