"""The report: JSON for programs, a CSV line for each request, a page for people, and its plots as files."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from clients.loadtest.cost import generator_cost, warnings
from clients.loadtest.decoding import PlanError
from clients.loadtest.drawing import svg_file
from clients.loadtest.fleet import Run
from clients.loadtest.page import render_page
from clients.loadtest.plan import Plan, Tenant
from clients.loadtest.plots import report_plots
from clients.loadtest.samples import COLUMNS, Samples, merge
from clients.loadtest.settings import settings_of
from clients.loadtest.statistics import loop_kind, measured, summarise
from clients.loadtest.workload import Workload

FORMAT = "loraplex.loadtest/1"
JSON_NAME, PAGE_NAME, CSV_NAME, PLOTS_NAME = "report.json", "report.html", "requests.csv", "plots"

CLOSED_NOTE = (
    "closed loop: a request is sent when the one before it has ended, so a cluster that stalls is asked less often and "
    "the slow times are undercounted (coordinated omission); measure latencies in an open loop"
)


def run_report(label: str, plan: Plan, run: Run) -> tuple[dict[str, Any], Samples]:
    """Build the report of a run; returns it with its samples."""
    samples = merge(share.samples for share in run.shares)
    adapters = [(plan.tenants[number].name, name) for number, name in Workload(plan).adapters]
    summary = dict(summarise(plan, samples, adapters))
    cost = generator_cost(run.shares, samples)
    gave_up_s = [share.gave_up_s for share in run.shares if not math.isnan(share.gave_up_s)]
    never_sent = sum(share.never_sent for share in run.shares)
    kept = len(measured(plan, samples).samples)
    ended_early = ""
    if run.interrupted:
        ended_early = "interrupted"
    elif gave_up_s:
        ended_early = f"nothing answered any more; gave up after {min(gave_up_s):.1f} s"
    return {
        "label": label,
        "sweep_value": _sweep_value(plan),
        "started": datetime.fromtimestamp(run.started_unix_s, UTC).isoformat(timespec="seconds"),
        "ended_early": ended_early,
        "accounting": {
            "sent": len(samples),
            "warm_up": len(samples) - kept,
            "measured": kept,
            "never_sent": never_sent,
        },
        **summary,
        "generator": cost,
        "warnings": warnings(cost, summary["times"]),
        "notes": [CLOSED_NOTE] if loop_kind(plan) == "closed" else [],
    }, samples


def whole_report(plan: Plan, router: str, command: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Build the report of all runs."""
    return {
        "format": FORMAT,
        "name": plan.name,
        "command": command,
        "router": router,
        "seed": plan.seed,
        "settings": settings_of(plan, router),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "tenants": [_tenant(tenant) for tenant in plan.tenants],
        "runs": list(runs),
    }


def write(directory: Path, report: Mapping[str, Any], samples: Sequence[tuple[str, Samples]], plan: Plan) -> None:
    """Write the files into `directory`, creating it; each file is replaced atomically. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    plots = report_plots(report["runs"])
    _place(directory / JSON_NAME, json.dumps(report, allow_nan=False) + "\n")
    _place(directory / PAGE_NAME, render_page(report, plots))
    (directory / PLOTS_NAME).mkdir(exist_ok=True)
    for name, plot in plots.by_name():
        _place(directory / PLOTS_NAME / f"{name}.svg", svg_file(plot.svg))
    staging = directory / (CSV_NAME + ".new")
    with staging.open("w", encoding="utf-8", newline="") as file:
        _write_csv(csv.writer(file), samples, plan)
    staging.replace(directory / CSV_NAME)


def read_report(path: Path) -> dict[str, Any]:
    """Read a report's JSON file. Raises PlanError."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: {(error.strerror or 'not readable').lower()}") from error
    except ValueError as error:
        raise PlanError(f"{path}: not JSON: {error}") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise PlanError(f"{path}: not a load test's {JSON_NAME} ({FORMAT})")
    return report


def _place(path: Path, content: str) -> None:
    staging = path.with_name(path.name + ".new")
    staging.write_text(content, encoding="utf-8")
    staging.replace(path)


def _write_csv(writer: Any, parts: Sequence[tuple[str, Samples]], plan: Plan) -> None:
    """Write a line for each request: numbers, empty cells for missing ones, names of tenants, adapters and statuses."""
    adapters = Workload(plan).adapters
    writer.writerow(("run", *COLUMNS))
    for label, samples in parts:
        for row in samples.rows:
            cells: dict[str, Any] = {
                name: "" if np.isnan(value) else int(value) if not name.endswith("_s") else round(float(value), 6)
                for name, value in zip(COLUMNS, row, strict=True)
            }
            cells["tenant"] = plan.tenants[cells["tenant"]].name
            cells["adapter"] = adapters[cells["adapter"]][1] if cells["adapter"] >= 0 else ""
            cells["status"] = samples.statuses[cells["status"]]
            writer.writerow((label, *cells.values()))


def _sweep_value(plan: Plan) -> float | None:
    """Return the value that a sweep varies: the concurrency or the rate."""
    arrivals = plan.arrivals
    return getattr(arrivals, "concurrency", None) or getattr(arrivals, "rate_per_s", None)


def _tenant(tenant: Tenant) -> dict[str, Any]:
    return {
        "tenant": tenant.name,
        "weight": tenant.weight,
        "adapters": len(tenant.adapters.names),
        "prompt_tokens": str(tenant.prompt_tokens),
        "answer_tokens": str(tenant.answer_tokens),
        "slo": [slo.text for slo in tenant.slos],
    }
