"""Defines the dashboards, and checks that the metrics, queries and runbook sections exist that they and the rules name.

python -m bench.monitoring           print the problems; the exit status is 1 if there are any
python -m bench.monitoring --write   write the dashboards' JSON files for Grafana first
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

# Grafana's names of units.
SECONDS, SHARE, BYTES, COUNT = "s", "percentunit", "bytes", "short"
PER_SECOND = "ops"


@dataclass(frozen=True)
class Panel:
    """A chart. `queries` are PromQL expressions and the legends of their series."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    meaning: str = ""


@dataclass(frozen=True)
class Dashboard:
    """A dashboard. `variable` is the label that its reader picks a value of, from the series of `metric`."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    variable: str = ""
    metric: str = ""


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Return the query of a counter's increase a second, summed up by a label."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{where}[$__rate_interval]))"


def rates(title: str, metric: str, by: str, where: str = "", meaning: str = "") -> Panel:
    """Chart the events a second of each value of a label."""
    query = rate(metric, by, where)
    if by == "adapter":  # the base model's have none, and would have no legend
        query = f'label_replace({query}, "adapter", "base model", "adapter", "")'
    return Panel(title, PER_SECOND, ((query, f"{{{{{by}}}}}"),), meaning)


def quantile(fraction: float, metric: str) -> str:
    """Return the query of a quantile of a histogram."""
    return f"histogram_quantile({fraction}, {rate(f'{metric}_bucket', 'le')})"


def quantiles(title: str, metric: str, meaning: str = "") -> Panel:
    """Chart three quantiles of a histogram of seconds."""
    return Panel(
        title,
        SECONDS,
        tuple((quantile(fraction, metric), f"p{fraction * 100:g}") for fraction in (0.5, 0.9, 0.99)),
        meaning,
    )


def objective(title: str, what: str, meaning: str) -> Panel:
    """Chart the shares of failures that the rules record of each tenant, in a long and in a short window."""
    windows = (("1h", "an hour"), ("5m", "5 minutes"))
    return Panel(
        title,
        SHARE,
        tuple(
            (f'loraplex:tenant_{what}:ratio_rate{window}{{tenant=~"$tenant"}}', f"{{{{tenant}}}}, {words}")
            for window, words in windows
        ),
        meaning,
    )


def hit_rate(tier: str) -> str:
    """Return the query of the share of requests whose adapter was in a tier."""
    hits = rate("loraplex_adapter_requests_total", where=f'{{tier="{tier}",result="hit"}}')
    return f"{hits} / " + rate("loraplex_adapter_requests_total", where=f'{{tier="{tier}"}}')


CLUSTER = Dashboard(
    "loraplex-cluster",
    "Loraplex: cluster",
    (
        (
            "Requests",
            (
                rates("Calls that ended, by status", "loraplex_requests_total", "code"),
                rates(
                    "Errors, by reason",
                    "loraplex_request_errors_total",
                    "reason",
                    meaning="Each reason has a line in docs/reference/errors.md.",
                ),
                Panel(
                    "Tokens",
                    PER_SECOND,
                    (
                        (rate("loraplex_generation_tokens_total"), "generated"),
                        (rate("loraplex_prompt_tokens_total"), "prompt"),
                        (rate("loraplex_prompt_tokens_cached_total"), "of these cached"),
                    ),
                ),
                quantiles("Time to first token", "loraplex_time_to_first_token_seconds"),
                quantiles("Time between messages of an answer", "loraplex_inter_token_latency_seconds"),
                quantiles("Time in the queue", "loraplex_request_queue_time_seconds"),
            ),
        ),
        (
            "HTTP",
            (
                rates("HTTP requests, by status", "loraplex_http_requests_total", "status"),
                quantiles("Time of an HTTP request", "loraplex_http_request_seconds", "To the end of its answer."),
                Panel(
                    "HTTP connections",
                    COUNT,
                    (
                        ("sum(loraplex_http_connections)", "open"),
                        ("sum(loraplex_http_requests_open)", "requests that run"),
                    ),
                ),
            ),
        ),
        (
            "Queue and workers",
            (
                Panel(
                    "Jobs that wait, by model",
                    COUNT,
                    (("max by (model) (loraplex_queue_jobs_waiting)", "{{model}}"),),
                ),
                Panel(
                    "Workers, by phase",
                    COUNT,
                    (("max by (model, phase, revision) (loraplex_workers)", "{{model}} {{phase}} {{revision}}"),),
                ),
                Panel(
                    "Rows",
                    COUNT,
                    (
                        ("sum(loraplex_num_requests_running)", "running"),
                        ("sum(loraplex_num_requests_waiting)", "waiting in engines"),
                        ("sum(loraplex_num_requests_limit)", "limit"),
                    ),
                    "Sequences in the batches of all workers.",
                ),
                Panel("KV blocks in use", SHARE, (("loraplex_kv_cache_usage_perc", "{{instance}}"),)),
                Panel(
                    "Prefix cache: share of prompt tokens found",
                    SHARE,
                    (
                        (
                            f"{rate('loraplex_prefix_cache_hits_total')} / "
                            f"{rate('loraplex_prefix_cache_queries_total')}",
                            "found",
                        ),
                    ),
                ),
                quantiles("Time of a step", "loraplex_engine_step_seconds"),
            ),
        ),
        (
            "Faults",
            (
                rates("Attempts after the first, by cause", "loraplex_redispatches_total", "cause"),
                Panel(
                    "Losses",
                    PER_SECOND,
                    (
                        (rate("loraplex_workers_lost_total"), "workers lost"),
                        (rate("loraplex_engines_lost_total"), "engines lost"),
                        (rate("loraplex_jobs_poisoned_total"), "jobs that killed engines"),
                    ),
                ),
                rates("Preemptions", "loraplex_num_preemptions_total", "instance"),
                Panel(
                    "Relay",
                    COUNT,
                    (
                        ("sum(loraplex_relay_links)", "links"),
                        ("sum(loraplex_relay_workers_unlinked)", "workers without a link"),
                    ),
                ),
            ),
        ),
    ),
)
TENANT = Dashboard(
    "loraplex-tenant",
    "Loraplex: tenant",
    (
        (
            "$tenant",
            (
                rates(
                    "Answered requests, by adapter", "loraplex_tenant_requests_total", "adapter", '{tenant=~"$tenant"}'
                ),
                rates(
                    "Requests that failed, by status",
                    "loraplex_tenant_request_failures_total",
                    "code",
                    '{tenant=~"$tenant"}',
                ),
                objective(
                    "Calls that failed by the cluster's fault",
                    "errors",
                    "Share of the calls without those that failed by the caller's own fault or limit.",
                ),
                objective("Answers that began too late", "slow", "Share of the answers beyond the objective's time."),
                rates(
                    "Tokens of answers, by adapter",
                    "loraplex_tenant_generation_tokens_total",
                    "adapter",
                    '{tenant=~"$tenant"}',
                ),
                rates(
                    "Tokens of prompts, by adapter",
                    "loraplex_tenant_prompt_tokens_total",
                    "adapter",
                    '{tenant=~"$tenant"}',
                ),
                Panel(
                    "Mean time to first token",
                    SECONDS,
                    (
                        (
                            rate("loraplex_tenant_time_to_first_token_seconds_total", where='{tenant=~"$tenant"}')
                            + " / "
                            + rate("loraplex_tenant_requests_total", where='{tenant=~"$tenant"}'),
                            "mean",
                        ),
                    ),
                ),
                rates(
                    "Refusals by the plan, by limit", "loraplex_quota_refusals_total", "limit", '{tenant=~"$tenant"}'
                ),
            ),
        ),
    ),
    variable="tenant",
    metric="loraplex_tenant_requests_total",
)
ADAPTER = Dashboard(
    "loraplex-adapter",
    "Loraplex: adapters",
    (
        (
            "$adapter",
            (
                rates(
                    "Answered requests, by tenant", "loraplex_tenant_requests_total", "tenant", '{adapter=~"$adapter"}'
                ),
                rates(
                    "Tokens of answers", "loraplex_tenant_generation_tokens_total", "adapter", '{adapter=~"$adapter"}'
                ),
            ),
        ),
        (
            "Cache of adapters",
            (
                Panel(
                    "Requests whose adapter was there",
                    SHARE,
                    ((hit_rate("device"), "in a slot"), (hit_rate("disk"), "on the disk")),
                ),
                Panel(
                    "Slots",
                    COUNT,
                    (("sum by (state) (loraplex_adapter_slots)", "{{state}}"),),
                ),
                Panel(
                    "Loads, evictions, downloads",
                    PER_SECOND,
                    (
                        (rate("loraplex_adapter_loads_total"), "loads into a slot"),
                        (rate("loraplex_adapter_swaps_total"), "evictions from a slot"),
                        (rate("loraplex_adapter_fetches_total", "result"), "downloads: {{result}}"),
                    ),
                ),
                Panel("Bytes, by tier", BYTES, (("sum by (tier) (loraplex_adapter_bytes)", "{{tier}}"),)),
                quantiles("Wait for the disk", "loraplex_request_adapter_fetch_time_seconds"),
                quantiles("Wait for a slot", "loraplex_request_adapter_load_time_seconds"),
            ),
        ),
    ),
    variable="adapter",
    metric="loraplex_tenant_requests_total",
)
DASHBOARDS = (CLUSTER, TENANT, ADAPTER)


FOLDER = Path(__file__).parents[1] / "deploy" / "monitoring" / "grafana" / "dashboards"
# Grafana's grid has 24 columns: three charts beside each other.
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
# Version of the JSON's layout, which newer versions of Grafana migrate.
_SCHEMA = 39
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def write_dashboards() -> None:
    """Write every dashboard's file."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        path_of(dashboard).write_text(render(dashboard))
        print(path_of(dashboard))


def path_of(dashboard: Dashboard) -> Path:
    """Return the file of a dashboard."""
    return FOLDER / f"{dashboard.uid}.json"


def render(dashboard: Dashboard) -> str:
    """Return the JSON of a dashboard."""
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["loraplex"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables(dashboard))},
        "links": [{"type": "dashboards", "tags": ["loraplex"], "title": "Loraplex", "keepTime": True}],
        "panels": list(_panels(dashboard)),
    }
    return json.dumps(document, indent=1) + "\n"


def _variables(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    yield {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}
    if dashboard.variable:
        yield {
            "name": dashboard.variable,
            "label": dashboard.variable.capitalize(),
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": f"label_values({dashboard.metric}, {dashboard.variable})", "refId": "values"},
            "refresh": 2,
            "sort": 1,
            "includeAll": True,
            "multi": True,
        }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for title, panels in dashboard.rows:
        number += 1
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        top += 1
        for index, panel in enumerate(panels):
            number += 1
            at = divmod(index * _WIDTH, _COLUMNS)
            place = {"h": _HEIGHT, "w": _WIDTH, "x": at[1], "y": top + at[0] * _HEIGHT}
            yield {"id": number, "gridPos": place, **_chart(panel)}
        top += -(-len(panels) * _WIDTH // _COLUMNS) * _HEIGHT


def _chart(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


RULES = Path("deploy/monitoring/rules.yml")
METRICS = Path("docs/reference/metrics.md")
RUNBOOK = Path("docs/guides/runbook.md")
# Suffixes of a histogram's series.
_SERIES = re.compile(r"_(?:bucket|sum|count)$")
# Durations that Grafana puts in place of its variables.
_VARIABLES = {"$__rate_interval": "1m", "$tenant": "acme", "$adapter": "acme/a"}


def check_monitoring(root: Path) -> list[str]:
    """Return a line for each problem of the dashboards and rules below `root`."""
    documented = {"up", *re.findall(r"^[|-] `(\w+)(?:\{[\w,]+\})?`", (root / METRICS).read_text(), re.MULTILINE)}
    rules = [rule for group in yaml.safe_load((root / RULES).read_text())["groups"] for rule in group["rules"]]
    documented |= {rule["record"] for rule in rules if "record" in rule}
    return [
        *_dashboard_problems(root, documented),
        *_rule_problems(rules, documented),
        *_runbook_problems([rule for rule in rules if "alert" in rule], (root / RUNBOOK).read_text()),
    ]


def metrics_of(expression: str) -> set[str]:
    """Return the names of the series in a PromQL expression. Raises ValueError where it can't be read."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    names = set()

    def visit(part: object) -> None:
        selector = getattr(part, "vector_selector", part)
        if isinstance(selector, promql_parser.VectorSelector):
            names.add(str(selector.name))

    promql_parser.walk(promql_parser.parse(expression), visit)
    return names


def _unknown(where: str, expression: str, documented: set[str]) -> Iterator[str]:
    try:
        names = metrics_of(expression)
    except ValueError as error:
        yield f"{where}: {' '.join(str(error).split())}"
        return
    if not names:
        yield f"{where}: names no metric"
    yield from (
        f"{where}: no metric {name}" for name in sorted(names) if not {name, _SERIES.sub("", name)} & documented
    )


def _dashboard_problems(root: Path, documented: set[str]) -> Iterator[str]:
    for dashboard in DASHBOARDS:
        path = root / path_of(dashboard).relative_to(Path(__file__).parents[1])
        if not path.is_file() or path.read_text() != render(dashboard):
            yield f"{path.name}: is not what bench.monitoring says; python -m bench.monitoring --write"
        for _, panels in dashboard.rows:
            for panel in panels:
                for expression, _ in panel.queries:
                    yield from _unknown(f"{dashboard.title}: {panel.title}", expression, documented)


def _rule_problems(rules: list[dict[str, Any]], documented: set[str]) -> Iterator[str]:
    for rule in rules:
        yield from _unknown(f"{RULES}: {rule.get('alert') or rule['record']}", rule["expr"], documented)


def _runbook_problems(rules: list[dict[str, Any]], runbook: str) -> Iterator[str]:
    sections = set(re.findall(r"^## (\w+)$", runbook, re.MULTILINE))
    alerts = {rule["alert"] for rule in rules}
    yield from (f"{RUNBOOK}: no section {name}" for name in sorted(alerts - sections))
    yield from (f"{RUNBOOK}: no alert {name}" for name in sorted(sections - alerts))
    for rule in rules:
        link = f"{{{{ $externalLabels.docs }}}}/{RUNBOOK.relative_to('docs')}#{rule['alert'].lower()}"
        if rule["annotations"]["runbook_url"] != link:
            yield f"{RULES}: {rule['alert']}: runbook_url is not {link}"


def main() -> int:
    """Print the problems of this source tree; returns 1 if there are any."""
    if sys.argv[1:] == ["--write"]:
        write_dashboards()
    problems = check_monitoring(Path(__file__).resolve().parents[1])
    print("\n".join(problems) if problems else "dashboards and rules: all that they name exists")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
