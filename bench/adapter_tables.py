"""Rows and plot of bench.adapters."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.adapter_engine import Saturation
from bench.adapter_loads import percentile
from bench.plots import Panel


def saturated_rows(runs: dict[int, list[Saturation]]) -> list[dict[str, Any]]:
    """Rows of saturated runs, by the number of adapters."""
    return [
        row(f"{count} adapters, saturated", "tokens/s", [one.tokens_per_s for one in mine])
        | {"swaps a request": sum(one.swaps for one in mine) / sum(one.requests for one in mine)}
        for count, mine in runs.items()
    ]


def row(case: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    """A row: median, spread and 99th percentile."""
    return {
        "case": case,
        "unit": unit,
        "median": median(values),
        "low": min(values),
        "high": max(values),
        "runs": len(values),
        "p99": percentile(values, 99),
    }


def panels(slots: int, taken: dict[float, list[float]]) -> list[Panel]:
    """The plot of seconds to the first token by active adapters a slot."""
    lines = {
        name: [(share, 1e3 * percentile(values, percent)) for share, values in taken.items()]
        for name, percent in (("median", 50), ("99th percentile", 99))
    }
    title = f"half the peak load, {slots} slots"
    return [Panel(title, "active adapters a slot", "ms to the first token", lines, logarithmic=False)]
