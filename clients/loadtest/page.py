"""The report for people: one HTML file that needs nothing else, neither a network nor a script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from clients.loadtest import plots

_COLUMNS = ("count", "mean", "p50", "p90", "p95", "p99", "p99.9", "max")
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
_ADAPTERS_SHOWN = 50


def page(report: Mapping[str, Any]) -> str:
    """The HTML of a report."""
    runs: Sequence[Mapping[str, Any]] = report["runs"]
    body = [_head(report)]
    if len(runs) > 1:
        body.append(_sweep(runs))
    body += [_run(run, alone=len(runs) == 1) for run in runs]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(report['name'])}</title><style>\n{css()}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def css() -> str:
    """The page's style sheet, for its plots too."""
    return resources.files("clients.loadtest").joinpath("page.css").read_text(encoding="utf-8")


def milliseconds(value: float | None) -> str:
    """Seconds as people read them: milliseconds with three digits or so."""
    if value is None:
        return "-"
    return f"{value * 1e3:.2f}" if value < 0.1 else f"{value * 1e3:,.0f}"


def percent(value: float | None) -> str:
    """A share."""
    return "-" if value is None else f"{value * 100:.1f}%"


def _head(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    return (
        f"<h1>{escape(report['name'])}</h1>"
        f'<p class="dim">{escape(report["runs"][0]["started"])} · router {escape(report["router"])} · '
        f"seed {report['seed']} · sent from {escape(machine['system'])}, {machine['cores']} cores, "
        f"Python {escape(machine['python'])}<br/><code>{escape(report['command'])}</code></p>"
    )


def _sweep(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            run["label"],
            f"{run['figures']['requests']:,}",
            f"{run['figures']['errors']:,}",
            f"{run['figures']['requests_per_s']:,.1f}",
            f"{run['figures']['tokens_per_s']:,.0f}",
            *(milliseconds(run["times"][name][p]) for name in ("ttft", "tpot", "latency") for p in ("p50", "p99")),
        )
        for run in runs
    ]
    heads = ("run", "requests", "errors", "requests/s", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99")
    return (
        "<h2>Throughput against latency</h2>"
        + _grid(plots.sweep(runs))
        + _table((*heads, "latency p50", "p99"), rows)
        + '<p class="dim">Times in milliseconds.</p>'
    )


def _run(run: Mapping[str, Any], *, alone: bool) -> str:
    slow = [f'<p class="warn">{escape(line)}</p>' for line in run["warnings"]]
    if run["ended_early"]:
        left = run["accounting"]["never_sent"]
        slow.insert(0, f'<p class="warn">Ended early: {escape(run["ended_early"])}; {left:,} requests never sent.</p>')
    notes = [f'<p class="note">{escape(line)}</p>' for line in run["notes"]]
    times = [
        (_NAMES[name], *(f"{spread['count']:,}", *(milliseconds(spread[column]) for column in _COLUMNS[1:])))
        for name, spread in run["times"].items()
    ]
    parts = [
        f"<h2>{escape(run['label'])}</h2>",
        *slow,
        *notes,
        _cards(run),
        "<h3>Times, in milliseconds</h3>",
        _table(("", *_COLUMNS), times),
        _grid(plots.run(run)),
        _tenants(run),
        _adapters(run),
        _statuses(run),
        _generator(run),
    ]
    whole = "\n".join(part for part in parts if part)
    return whole if alone else f"<details><summary>{escape(run['label'])}</summary>\n{whole}\n</details>"


def _cards(run: Mapping[str, Any]) -> str:
    figures = run["figures"]
    cards = (
        (f"{figures['requests']:,}", "requests"),
        (f"{figures['errors']:,}", f"errors, {percent(figures['error_share'])}"),
        (f"{figures['requests_per_s']:,.2f}", "answered a second"),
        (f"{figures['tokens_per_s']:,.0f}", "tokens a second"),
        (f"{figures['goodput_per_s']:,.2f}", f"goodput a second, {percent(figures['goodput_share'])}"),
        (f"{figures['cold']:,}", f"cold adapters, {percent(figures['cold_share'])}"),
        (f"{figures['elapsed_s']:,.1f} s", "measured"),
    )
    return (
        '<div class="cards">'
        + "".join(f"<div><b>{value}</b><span>{name}</span></div>" for value, name in cards)
        + "</div>"
    )


def _tenants(run: Mapping[str, Any]) -> str:
    rows = [
        (
            tenant["tenant"],
            f"{tenant['figures']['requests']:,}",
            percent(tenant["request_share"]),
            percent(tenant["token_share"]),
            f"{tenant['figures']['errors']:,}",
            f"{tenant['figures']['goodput_per_s']:,.2f}",
            *(milliseconds(tenant["times"][name][p]) for name in ("ttft", "itl", "latency") for p in ("p50", "p99")),
        )
        for tenant in run["tenants"]
    ]
    heads = (
        "tenant",
        "requests",
        "of requests",
        "of tokens",
        "errors",
        "goodput/s",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
    )
    return "<h3>Tenants</h3>" + _table((*heads, "latency p50", "p99"), rows)


def _adapters(run: Mapping[str, Any]) -> str:
    adapters = run["adapters"]
    rows = [
        (
            one["adapter"] or "base model",
            one["tenant"] or "-",
            f"{one['requests']:,}",
            f"{one['errors']:,}",
            f"{one['cold']:,}",
            *(milliseconds(one[name][p]) for name in ("ttft", "itl", "latency") for p in ("p50", "p99")),
        )
        for one in adapters[:_ADAPTERS_SHOWN]
    ]
    more = len(adapters) - len(rows)
    tail = f'<p class="dim">and {more:,} more, in the JSON file</p>' if more > 0 else ""
    heads = (
        "adapter",
        "tenant",
        "requests",
        "errors",
        "cold",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
        "latency p50",
        "p99",
    )
    return "<h3>Adapters</h3>" + _table(heads, rows) + tail


def _statuses(run: Mapping[str, Any]) -> str:
    counted = run["accounting"]
    line = (
        f"{counted['sent']:,} sent = {counted['warm_up']:,} in the warm-up + {counted['measured']:,} measured; "
        f"{counted['never_sent']:,} never sent."
    )
    rows = [(status, f"{count:,}") for status, count in run["statuses"].items()]
    return f'<h3>How the requests ended</h3>{_table(("status", "requests"), rows)}<p class="dim">{line}</p>'


def _generator(run: Mapping[str, Any]) -> str:
    cost = run["generator"]
    rows = [
        (name, *(milliseconds(cost[key][column]) for column in _COLUMNS[1:]))
        for name, key in (("sent late by", "send_delay"), ("read late by", "read_delay"))
    ]
    each, busy = cost["cpu_us_per_message"] or 0.0, percent(cost["busy_share"])
    return (
        f"<h3>What generating it cost</h3><p>Processes: {cost['processes']}. They used {cost['cpu_s']:.2f} s of "
        f"processor time, the busiest {busy} of a core; {each:.0f} µs for each request or message.</p>"
        + _table(("milliseconds", *_COLUMNS[1:]), rows)
    )


def _grid(drawn: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<div><h3>{escape(title)}</h3>{svg}</div>" for title, svg in drawn)
    return f'<div class="plots">{cells}</div>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
