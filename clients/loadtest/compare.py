"""Two reports side by side: the runs that both have, and what changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clients.loadtest.decoding import PlanError

_TIMES = ("ttft", "itl", "tpot", "latency")
_FIGURES = ("requests_per_s", "tokens_per_s", "goodput_per_s", "error_share", "cold_share")
# More of these is better; of everything else less is.
_HIGHER = {"requests_per_s", "tokens_per_s", "goodput_per_s"}


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each run and value of both: `a`, `b`, `change` (b / a - 1) and whether that is `better`.

    Times in seconds. Runs pair by label; two reports of one run each pair whatever it is called. Raises PlanError where
    no run pairs.
    """
    pairs = [(one["label"], one, other) for one in a["runs"] for other in b["runs"] if one["label"] == other["label"]]
    if not pairs and len(a["runs"]) == len(b["runs"]) == 1:
        one, other = a["runs"][0], b["runs"][0]
        pairs = [(f"{one['label']} / {other['label']}", one, other)]
    if not pairs:
        raise PlanError("the two reports have no run in common: compare tests of the same arrivals")
    rows = []
    for label, one, other in pairs:
        for metric in _TIMES:
            for statistic in ("p50", "p90", "p99"):
                before, after = one["times"][metric][statistic], other["times"][metric][statistic]
                rows.append(_row(label, f"{metric}.{statistic}", before, after))
        rows += [_row(label, name, one["figures"][name], other["figures"][name]) for name in _FIGURES]
    return rows


def _row(label: str, name: str, before: float | None, after: float | None) -> dict[str, Any]:
    change = after / before - 1 if before and after is not None else None
    better = None if before is None or after is None or before == after else (after > before) == (name in _HIGHER)
    return {"run": label, "value": name, "a": before, "b": after, "change": change, "better": better}
