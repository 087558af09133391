"""Comparison of two reports: the runs that both have, and what changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clients.loadtest.decoding import PlanError

_TIMES = ("ttft", "itl", "tpot", "latency")
_FIGURES = ("requests_per_s", "tokens_per_s", "texts_per_s", "goodput_per_s", "error_share", "cold_share")
# Figures of which more is better; of all others, less is.
_HIGHER = {"requests_per_s", "tokens_per_s", "texts_per_s", "goodput_per_s"}


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each run and value of both: `a`, `b`, `change` (b / a - 1) and whether that is `better`.

    Times are in seconds. Runs with the same label are compared, and so are two reports of a single run each. Raises
    PlanError if there is nothing to compare.
    """
    pairs = [
        (first["label"], first, second)
        for first in a["runs"]
        for second in b["runs"]
        if first["label"] == second["label"]
    ]
    if not pairs and len(a["runs"]) == len(b["runs"]) == 1:
        first, second = a["runs"][0], b["runs"][0]
        pairs = [(f"{first['label']} / {second['label']}", first, second)]
    if not pairs:
        raise PlanError("the two reports have no run in common: compare tests of the same arrivals")
    rows = []
    for label, first, second in pairs:
        for metric in _TIMES:
            for statistic in ("p50", "p90", "p99"):
                before, after = first["times"][metric][statistic], second["times"][metric][statistic]
                rows.append(_row(label, f"{metric}.{statistic}", before, after))
        # Only tests of embed or classify have texts.
        figures = [name for name in _FIGURES if name != "texts_per_s" or first["figures"].get("texts")]
        rows += [_row(label, name, first["figures"].get(name), second["figures"].get(name)) for name in figures]
    return rows


def _row(label: str, name: str, before: float | None, after: float | None) -> dict[str, Any]:
    change = after / before - 1 if before and after is not None else None
    better = None if before is None or after is None or before == after else (after > before) == (name in _HIGHER)
    return {"run": label, "value": name, "a": before, "b": after, "change": change, "better": better}
