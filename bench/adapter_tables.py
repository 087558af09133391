"""The table rows and the plot of bench.adapters."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.adapter_engine import Saturation
from bench.adapter_loads import percentile
from bench.plots import Panel


def saturated_rows(runs: dict[int, list[Saturation]]) -> list[dict[str, Any]]:
    """Return the rows of saturated runs, by the number of adapters."""
    return [
        row(f"{count} adapters, saturated", "tokens/s", [run.tokens_per_s for run in measured])
        | {"swaps a request": sum(run.swaps for run in measured) / sum(run.requests for run in measured)}
        for count, measured in runs.items()
    ]


def row(case: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    """Return a row with the median, the spread and the 99th percentile."""
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
    """Return the plot of the time to the first token by active adapters a slot."""
    lines = {
        name: [(share, 1e3 * percentile(values, percent)) for share, values in taken.items()]
        for name, percent in (("median", 50), ("99th percentile", 99))
    }
    title = f"half the peak load, {slots} slots"
    return [Panel(title, "active adapters a slot", "ms to the first token", lines, logarithmic=False)]
