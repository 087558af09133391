"""Comparison of two reports: the runs that both have, what changed, and which changes are more than noise."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from loraplex.loadtest.arrivals import Extent
from loraplex.loadtest.conditions import TIMES
from loraplex.loadtest.decoding import PlanError
from loraplex.loadtest.plan import LoadPlan, Tenant, describe

# Maximum number of names or prompts that a setting lists; of more it has the number and a digest.
_LISTED = 5
_FIGURES = ("requests_per_s", "tokens_per_s", "texts_per_s", "goodput_per_s", "error_share", "cold_share")
# Figures that are shown and not judged: they depend on the length of the test.
_COUNTS = ("requests", "errors")
# Figures of which more is better; of all others, less is.
_HIGHER = {"requests_per_s", "tokens_per_s", "texts_per_s", "goodput_per_s"}
# Smallest change that is more than noise, as a share: confidence intervals leave out how the state of a machine differs
# from run to run.
_RUN_TO_RUN_SHARE = 0.05


def settings_of(plan: LoadPlan, router: str) -> dict[str, str]:
    """Return the settings of a test, by name."""
    sweep = f", swept over {', '.join(f'{value:g}' for value in plan.sweep)}" if plan.sweep else ""
    settings = {
        "router": router,
        "version": version("loraplex"),
        "arrivals": describe(plan.arrivals) + sweep,
        "length": _length(plan.extent),
        "seed": str(plan.seed),
        "model": plan.model or "the only one",
        "task": plan.task,
        "texts": str(plan.texts),
        "timeout": f"{plan.timeout_s:g} s",
        "processes": str(plan.processes),
    }
    for tenant in plan.tenants:
        settings |= {f"{tenant.name}: {name}": value for name, value in _of_tenant(tenant).items()}
    return settings


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the settings that differ between two reports, each with both values; `-` where one has none."""
    first, second = _of_report(a), _of_report(b)
    pairs = [(name, first.get(name, "-"), second.get(name, "-")) for name in dict.fromkeys([*first, *second])]
    return [(name, before, after) for name, before, after in pairs if before != after]


def _of_report(report: Mapping[str, Any]) -> dict[str, str]:
    settings: dict[str, str] = report["settings"]
    return settings | {f"machine's {name}": str(value) for name, value in report["machine"].items()}


def _of_tenant(tenant: Tenant) -> dict[str, str]:
    popularity = tenant.adapters
    adapters = [f"{name}={weight:g}" for name, weight in zip(popularity.names, popularity.weights, strict=True)]
    return {
        "weight": f"{tenant.weight:g}",
        "adapters": _listed(adapters),
        "prompts": _listed(tenant.prompts),
        "prompt tokens": str(tenant.prompt_tokens),
        "answer tokens": str(tenant.answer_tokens),
        "deadline": "" if tenant.deadline is None else str(tenant.deadline),
        "cancel": "" if tenant.cancel is None else str(tenant.cancel),
        "slo": ", ".join(slo.text for slo in tenant.slos),
    }


def _listed(texts: Sequence[str]) -> str:
    """Join a few short texts; describe many by their number and a digest."""
    joined = ", ".join(texts)
    if len(texts) <= _LISTED and len(joined) <= 100:
        return joined
    return f"{len(texts)}, with the digest {hashlib.sha256(repr(list(texts)).encode()).hexdigest()[:8]}"


def _length(extent: Extent) -> str:
    parts = [
        f"{extent.requests} requests" if extent.requests is not None else "",
        f"{extent.duration_s:g} s" if extent.duration_s is not None else "",
        f"{extent.warm_up_requests} requests of warm-up" if extent.warm_up_requests else "",
        f"{extent.warm_up_s:g} s of warm-up" if extent.warm_up_s else "",
    ]
    return ", ".join(part for part in parts if part) or "to its own end"


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
        names = [f"{metric}.{statistic}" for metric in TIMES for statistic in ("p50", "p90", "p99")]
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
    verdict = "" if name in _COUNTS else _verdict(name, first, second)
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


def _verdict(name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    before, after = _value(first, name), _value(second, name)
    if before is None or after is None or before == after:
        return ""
    low, high = first["intervals"][name], second["intervals"][name]
    if after < before:
        low, high = high, low
    apart = low[1] is not None and high[0] is not None and low[1] < high[0]
    if not apart or (before and abs(after / before - 1) <= _RUN_TO_RUN_SHARE):
        return "noise"
    return "better" if (after > before) == (name in _HIGHER) else "worse"
