"""The report: JSON for programs, a CSV line for each request, and for people an HTML page with its plots.

The page has its script and style inside, so that it opens without a network. Without JavaScript it has its tables and
pictures of the plots; with it, plots that can be pointed at and zoomed.
"""

from __future__ import annotations

import csv
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clients.loadtest.compare import settings_of
from clients.loadtest.decoding import PlanError
from clients.loadtest.plan import LoadPlan, Tenant
from clients.loadtest.plots import ReportPlots, javascript, report_plots, style_sheet, svg_file, with_own_ids
from clients.loadtest.samples import COLUMNS, Samples
from clients.loadtest.workload import Workload

if TYPE_CHECKING:
    from jinja2 import Template

FORMAT = "loraplex.loadtest/1"
JSON_NAME, PAGE_NAME, CSV_NAME, PLOTS_NAME = "report.json", "report.html", "requests.csv", "plots"

_COLUMNS = ["mean", "p50", "p90", "p95", "p99", "p99.9", "max"]
_NAMES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "latency": "latency",
    "ttft_from_send": "TTFT, from sending",
    "latency_from_send": "latency, from sending",
    "queue": "of it in the queue",
    "adapter": "of it for the adapter",
}
# Largest number of adapters in the table; report.json has all.
MAX_ADAPTERS = 50

Row = tuple[str, ...]


def whole_report(plan: LoadPlan, router: str, command: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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


def write(directory: Path, report: Mapping[str, Any], samples: Sequence[tuple[str, Samples]], plan: LoadPlan) -> None:
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


def _write_csv(writer: Any, parts: Sequence[tuple[str, Samples]], plan: LoadPlan) -> None:
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


def _tenant(tenant: Tenant) -> dict[str, Any]:
    return {
        "tenant": tenant.name,
        "weight": tenant.weight,
        "adapters": len(tenant.adapters.names),
        "prompt_tokens": str(tenant.prompt_tokens),
        "answer_tokens": str(tenant.answer_tokens),
        "slo": [slo.text for slo in tenant.slos],
    }


def render_page(report: Mapping[str, Any], plots: ReportPlots) -> str:
    """Render a report and its plots as HTML."""
    return _template().render(report=report, plots=plots, style_sheet=style_sheet(), javascript=javascript())


def milliseconds(value: float | None) -> str:
    """Format seconds as milliseconds, with three digits or so."""
    if value is None:
        return "-"
    return f"{value * 1e3:.2f}" if value < 0.1 else f"{value * 1e3:,.0f}"


def percent(value: float | None) -> str:
    """Format a share from 0 to 1 as a percentage."""
    return "-" if value is None else f"{value * 100:.1f}%"


def _count(value: int) -> str:
    return f"{value:,}"


def _rate(value: float, digits: int = 2) -> str:
    return f"{value:,.{digits}f}"


@cache
def _template() -> Template:
    import jinja2  # The command's other parts do not need it.

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("clients.loadtest", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"count": _count, "percent": percent, "rate": _rate, "with_own_ids": with_own_ids}
    environment.globals |= {
        "columns": _COLUMNS,
        "max_adapters": MAX_ADAPTERS,
        "adapter_rows": _adapter_rows,
        "cost_rows": _cost_rows,
        "status_rows": _status_rows,
        "sweep_rows": _sweep_rows,
        "tenant_rows": _tenant_rows,
        "time_rows": _time_rows,
    }
    return environment.get_template("page.html.j2")


def _percentiles(times: Mapping[str, Mapping[str, float | None]], *metrics: str) -> Row:
    return tuple(milliseconds(times[metric][percentile]) for metric in metrics for percentile in ("p50", "p99"))


def _spread(spread: Mapping[str, float | None]) -> Row:
    return tuple(milliseconds(spread[column]) for column in _COLUMNS)


def _time_rows(times: Mapping[str, Mapping[str, float]]) -> Iterator[Row]:
    for name, spread in times.items():
        yield (_NAMES[name], f"{spread['count']:,}", *_spread(spread))


def _sweep_rows(runs: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for run in runs:
        figures = run["figures"]
        yield (
            run["label"],
            f"{figures['requests']:,}",
            f"{figures['errors']:,}",
            f"{figures['requests_per_s']:,.1f}",
            f"{figures['tokens_per_s']:,.0f}",
            *_percentiles(run["times"], "ttft", "tpot", "latency"),
        )


def _tenant_rows(tenants: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for tenant in tenants:
        yield (
            tenant["tenant"],
            f"{tenant['figures']['requests']:,}",
            percent(tenant["request_share"]),
            percent(tenant["token_share"]),
            f"{tenant['figures']['errors']:,}",
            f"{tenant['figures']['goodput_per_s']:,.2f}",
            *_percentiles(tenant["times"], "ttft", "itl", "latency"),
        )


def _adapter_rows(adapters: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for adapter in adapters:
        yield (
            adapter["adapter"] or "base model",
            adapter["tenant"] or "-",
            f"{adapter['requests']:,}",
            f"{adapter['errors']:,}",
            f"{adapter['cold']:,}",
            *_percentiles(adapter, "ttft", "itl", "latency"),
        )


def _status_rows(statuses: Mapping[str, int]) -> Iterator[Row]:
    for status, count in statuses.items():
        yield status, f"{count:,}"


def _cost_rows(cost: Mapping[str, Any]) -> Iterator[Row]:
    for name, key in (("sent late by", "send_delay"), ("read late by", "read_delay")):
        yield (name, *_spread(cost[key]))
