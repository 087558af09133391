"""The settings of a test as short texts, so that a comparison of two reports can name those that differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from clients.loadtest.arrivals import Extent
from clients.loadtest.plan import Plan, Tenant, describe

# Maximum number of names or prompts that a setting lists; of more it has the number and a digest.
_LISTED = 5


def settings_of(plan: Plan, router: str) -> dict[str, str]:
    """Return the settings of a test, by name."""
    sweep = f", swept over {', '.join(f'{value:g}' for value in plan.sweep)}" if plan.sweep else ""
    found = {
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
        found |= {f"{tenant.name}: {name}": value for name, value in _of_tenant(tenant).items()}
    return found


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the settings that differ between two reports, each with both values; `-` where one has none."""
    first, second = _of_report(a), _of_report(b)
    names = list(dict.fromkeys([*first, *second]))
    if "settings" not in a or "settings" not in b:  # A report of an older version has few.
        names = [name for name in names if name in first and name in second]
    pairs = [(name, first.get(name, "-"), second.get(name, "-")) for name in names]
    return [(name, before, after) for name, before, after in pairs if before != after]


def _of_report(report: Mapping[str, Any]) -> dict[str, str]:
    machine = {f"machine's {name}": str(value) for name, value in report["machine"].items()}
    if "settings" in report:
        return {**report["settings"], **machine}
    tenants = {
        f"{tenant['tenant']}: {name}": str(tenant[key])
        for tenant in report["tenants"]
        for name, key in (("prompt tokens", "prompt_tokens"), ("answer tokens", "answer_tokens"))
    }
    return {"router": report["router"], "seed": str(report["seed"]), **tenants, **machine}


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
