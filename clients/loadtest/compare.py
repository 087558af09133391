"""Comparison of two reports: the runs that both have, what changed, and which changes are more than noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clients.loadtest.decoding import PlanError

_TIMES = ("ttft", "itl", "tpot", "latency")
_FIGURES = ("requests_per_s", "tokens_per_s", "texts_per_s", "goodput_per_s", "error_share", "cold_share")
# Figures that are shown and not judged: they depend on the length of the test.
_COUNTS = ("requests", "errors")
# Figures of which more is better; of all others, less is.
_HIGHER = {"requests_per_s", "tokens_per_s", "texts_per_s", "goodput_per_s"}
# Smallest change that is more than noise, as a share, where a report has no confidence intervals (an older version).
NOISE_SHARE = 0.1
# Smallest change that is more than noise, as a share, where there are intervals: these leave out how the state of a
# machine differs from run to run.
_RUN_TO_RUN_SHARE = 0.05


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each run and value of both: `a`, `b`, `change` (b / a - 1) and `verdict`.

    The verdict is `better` or `worse` where the confidence intervals of both runs are apart and the change is more than
    5%, else `noise`; `better` is True, False or None. Times are in seconds. Runs with the same label are compared, and
    so are two reports of a single run each. Raises PlanError if there is nothing to compare.
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
        names = [f"{metric}.{statistic}" for metric in _TIMES for statistic in ("p50", "p90", "p99")]
        # Only tests of embed or classify have texts.
        figures = [name for name in _FIGURES if name != "texts_per_s" or first["figures"].get("texts")]
        rows += [_row(label, name, first, second) for name in (*_COUNTS, *names, *figures)]
    return rows


def too_much_worse(rows: Sequence[Mapping[str, Any]], limit: float) -> list[Mapping[str, Any]]:
    """Return the rows that got worse by more than a share `limit`; from 0, any worsening is."""
    return [row for row in rows if row["better"] is False and (row["change"] is None or abs(row["change"]) > limit)]


def _row(label: str, name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    before, after = _value(first, name), _value(second, name)
    change = after / before - 1 if before and after is not None else None
    verdict = "" if name in _COUNTS else _verdict(name, before, after, _intervals(first, second, name))
    better = {"better": True, "worse": False}.get(verdict)
    return {
        "run": label,
        "value": name,
        "a": before,
        "b": after,
        "change": change,
        "better": better,
        "verdict": verdict,
    }


def _value(run: Mapping[str, Any], name: str) -> float | None:
    metric, _, statistic = name.partition(".")
    value: float | None = run["times"][metric][statistic] if statistic else run["figures"].get(name)
    return value


def _intervals(first: Mapping[str, Any], second: Mapping[str, Any], name: str) -> tuple[Any, Any] | None:
    """Return the confidence intervals of both runs; None if either report has none at all."""
    if "intervals" not in first or "intervals" not in second:
        return None
    return first["intervals"][name], second["intervals"][name]


def _verdict(name: str, before: float | None, after: float | None, intervals: tuple[Any, Any] | None) -> str:
    if before is None or after is None or before == after:
        return ""
    if intervals is None:
        apart = not before or abs(after / before - 1) > NOISE_SHARE
    else:
        low, high = intervals if after > before else reversed(intervals)
        apart = low[1] is not None and high[0] is not None and low[1] < high[0]
        apart = apart and (not before or abs(after / before - 1) > _RUN_TO_RUN_SHARE)
    if not apart:
        return "noise"
    return "better" if (after > before) == (name in _HIGHER) else "worse"
