"""The report: JSON for programs, a CSV line for each request, and for people an HTML page with its plots.

The page has its script and style inside, so that it opens without a network. Without JavaScript it has its tables and
pictures of the plots; with it, plots that can be pointed at and zoomed. The plots are drawn with Vega: vl-convert
brings its JavaScript and runs it. Colours are variables of `gateway/page/colours.css`, with a light and a dark set.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np

from loraplex.loadtest.charts import (
    Axis,
    Series,
    Spec,
    Stream,
    histogram_chart,
    line_chart,
    share_chart,
    timetable,
    two_axis_chart,
)
from loraplex.loadtest.compare import settings_of
from loraplex.loadtest.decoding import PlanError
from loraplex.loadtest.plan import LoadPlan, Tenant
from loraplex.loadtest.samples import COLUMNS, Samples
from loraplex.loadtest.workload import Workload

if TYPE_CHECKING:
    from jinja2 import Template

# Largest number of tenants in their chart; the table has all.
MAX_TENANTS = 24


def draw_svg(spec: Spec) -> str:
    """Draw a chart as an SVG element whose colours are variables of `colours.css`."""
    import vl_convert  # 84 MB of shared library: loaded when there is something to draw

    return vl_convert.vegalite_to_svg(spec, show_warnings=False)


def with_own_ids(svg: str, prefix: str) -> str:
    """Prefix the ids in an SVG element of `draw_svg`, which are the same in each, so that a page can hold several."""
    return re.sub(r'(\bid="|url\(#)(?=clip)', rf"\g<1>{prefix}-", svg)


def svg_file(svg: str) -> str:
    """Return the content of a file for an SVG element of `draw_svg`, with the colours in it."""
    head, _, rest = svg.partition(">")
    style = f"{_read('loraplex.gateway.page', 'colours.css')}svg {{ background: var(--paper); }}"
    return f"{head}><style>{style}</style>{rest}\n"


def javascript() -> str:
    """Return Vega, Vega-Lite and their embedding as one script, which defines `vegaEmbed`; 0.9 MB.

    Bundling takes seconds, so the script is kept in the user's cache folder, one for each version of vl-convert.
    """
    import vl_convert

    home = os.environ.get("HOME", os.devnull)  # nothing can be read or written below the latter
    folder = Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "loraplex"
    file = folder / f"vega-{version('vl-convert-python')}.js"
    with suppress(OSError):
        return file.read_text(encoding="utf-8")
    bundle: Callable[..., str] = vl_convert.javascript_bundle  # its type lacks the default of its parameter
    script = bundle()
    with suppress(OSError):  # a folder that cannot be written: bundled again the next time
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as fresh:
            fresh.write(script)
        os.replace(fresh.name, file)
    return script


def style_sheet() -> str:
    """Return the page's style sheet, with the colours of its charts."""
    return _read("loraplex.gateway.page", "colours.css") + _read("loraplex.loadtest", "page.css")


def _read(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Plot:
    """A chart with its title."""

    title: str
    spec: Spec

    @property
    def name(self) -> str:
        """Return the title's words before its colon, joined by hyphens, as in `one-stream`."""
        return "-".join(re.findall("[a-z]+", self.title.partition(":")[0].lower()))

    @cached_property
    def svg(self) -> str:
        """Return the chart as an SVG element, drawn once."""
        return draw_svg(self.spec)


@dataclass(frozen=True)
class ReportPlots:
    """The plots of a report: of its sweep, none for a single run, and of each of its runs."""

    sweep: Sequence[Plot]
    runs: Sequence[Sequence[Plot]]

    def by_name(self) -> Iterator[tuple[str, Plot]]:
        """Yield each plot with a name that is its own in the report, as in `run-1-one-stream`."""
        yield from ((f"sweep-{plot.name}", plot) for plot in self.sweep)
        for number, plots in enumerate(self.runs, 1):
            yield from ((f"run-{number}-{plot.name}", plot) for plot in plots)


def report_plots(runs: Sequence[Mapping[str, Any]]) -> ReportPlots:
    """Plot the runs of a report."""
    return ReportPlots(tuple(_sweep_plots(runs)) if len(runs) > 1 else (), [tuple(_run_plots(run)) for run in runs])


def _sweep_plots(runs: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    """Plot latency against throughput, and both over the value that was swept (after the serving course's plot)."""
    done = [run for run in runs if run["times"]["latency"]["count"]]
    if not done:
        return
    values = [run["sweep_value"] for run in done]
    speed = [run["figures"]["tokens_per_s"] for run in done]
    series = []
    for metric, percentile in (("latency", "p50"), ("latency", "p99"), ("ttft", "p50"), ("ttft", "p99")):
        times = [run["times"][metric][percentile] * 1e3 for run in done]
        name = f"{'TTFT' if metric == 'ttft' else metric} {percentile}"
        labels = [f"{value:g}" for value in values] if name == "latency p99" else ()
        series.append(Series(name, list(zip(speed, times, strict=True)), labels))
    yield Plot(
        "Latency against throughput", line_chart(Axis("tokens/s"), Axis("milliseconds", log=True), series, dots=True)
    )
    kind = "requests at once" if done[0]["loop"] == "closed" else "requests/s"
    tpot = [(run["times"]["tpot"]["p50"] or 0.0) * 1e3 for run in done]
    yield Plot(
        f"Time per token and throughput over {kind}",
        two_axis_chart(
            Axis(kind, log=True),
            (Axis("TPOT p50, milliseconds"), Series("TPOT", list(zip(values, tpot, strict=True)))),
            (Axis("tokens/s"), Series("tokens/s", list(zip(values, speed, strict=True)))),
            dots=True,
        ),
    )


def _run_plots(run: Mapping[str, Any]) -> Iterator[Plot]:
    """Plot the distributions, the timeline, the tenants' shares, and the first streams."""
    for name, title in (("ttft", "TTFT"), ("itl", "ITL: gaps between messages"), ("latency", "Latency")):
        histogram = run["histograms"][name]
        if histogram["counts"]:
            bounds = [bound * 1e3 for bound in histogram["bounds_s"]]
            marks = [(percentile, run["times"][name][percentile] * 1e3) for percentile in ("p50", "p90", "p99")]
            inside = [mark for mark in marks if bounds[0] <= mark[1] <= bounds[-1]]
            yield Plot(title, histogram_chart(Axis("milliseconds", log=True), bounds, histogram["counts"], inside))
    yield from _timeline_plots(run["timeline"])
    yield from _tenant_plots(run["tenants"])
    yield from _stream_plots(run["streams"])


def _timeline_plots(timeline: Mapping[str, Sequence[Any]]) -> Iterator[Plot]:
    if not timeline:
        return
    rates = {"sent/s": "sent_per_s", "ended/s": "ended_per_s", "errors/s": "errors_per_s", "running": "running"}
    at_s = timeline["at_s"]
    series = [Series(name, list(zip(at_s, timeline[key], strict=True))) for name, key in rates.items()]
    yield Plot("Requests over time", line_chart(Axis("seconds"), Axis("requests, or requests/s"), series))
    ttft_ms = [None if value is None else value * 1e3 for value in timeline["ttft_p50_s"]]
    yield Plot(
        "Messages and TTFT over time",
        two_axis_chart(
            Axis("seconds"),
            (Axis("messages/s"), Series("messages/s", list(zip(at_s, timeline["messages_per_s"], strict=True)))),
            (Axis("TTFT p50, milliseconds"), Series("TTFT p50, ms", list(zip(at_s, ttft_ms, strict=True)))),
            dots=None in ttft_ms,  # a value between two spans without one is no line
        ),
    )


def _tenant_plots(tenants: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    if len(tenants) < 2:
        return
    kinds = (("of the requests", "request_share"), ("of the tokens", "token_share"))
    rows = [
        (tenant["tenant"], kind, (tenant[key] or 0.0) * 100) for tenant in tenants[:MAX_TENANTS] for kind, key in kinds
    ]
    yield Plot("Tenants: % of requests asked (above), of tokens delivered (below)", share_chart(rows))


def _stream_plots(streams: Sequence[Mapping[str, Any]]) -> Iterator[Plot]:
    if not streams:
        return
    begin = min(stream["intended_s"] for stream in streams)
    owners = [(stream["tenant"], stream["adapter"]) for stream in streams]
    colours = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
    several = len(colours) > 1
    rows = []
    for number, (stream, owner) in enumerate(zip(streams, owners, strict=True)):
        adapter = stream["adapter"] or "base"
        messages = [round((at - begin) * 1e3, 3) for at in stream["messages_s"]]
        title = (
            f"request {stream['index']}, {stream['tenant']}, {adapter}: {len(messages)} messages, {stream['status']}"
        )
        span = ((stream["intended_s"] - begin) * 1e3, (stream["end_s"] - begin) * 1e3)
        name = adapter if several else f"#{stream['index']}"
        rows.append(Stream(name, *span, messages, colours[owner] if several else number, title))
    yield Plot(
        "The first streams: grey until the first token, a tick for each message", timetable(Axis("milliseconds"), rows)
    )
    first = rows[0]
    if first.messages:
        times = [first.begin, *first.messages]
        gaps = [(float(number), later - earlier) for number, (earlier, later) in enumerate(pairwise(times))]
        yield Plot(
            "One stream: its first token with the prefill, then each gap",
            line_chart(Axis("message", whole=True), Axis("milliseconds"), [Series("gap", gaps)], dots=True),
        )


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
        loader=jinja2.PackageLoader("loraplex.loadtest", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"count": _count, "milliseconds": milliseconds, "percent": percent, "rate": _rate}
    environment.filters["with_own_ids"] = with_own_ids
    environment.globals |= {"columns": _COLUMNS, "max_adapters": MAX_ADAPTERS, "names": _NAMES}
    return environment.get_template("page.html.j2")
