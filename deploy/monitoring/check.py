"""Check that all metrics, queries and runbook sections exist that dashboards and rules name.

python -m deploy.monitoring.check           print the problems; the exit status is 1 if there are any
python -m deploy.monitoring.check --write   write the dashboards' JSON files for Grafana first
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from deploy.monitoring.panels import DASHBOARDS, Dashboard, Panel

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
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
    documented = {"up", *re.findall(r"^\| `(\w+)` \|", (root / METRICS).read_text(), re.MULTILINE)}
    rules = [rule for group in yaml.safe_load((root / RULES).read_text())["groups"] for rule in group["rules"]]
    return [
        *_dashboard_problems(root, documented),
        *_rule_problems(rules, documented),
        *_runbook_problems(rules, (root / RUNBOOK).read_text()),
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
        path = root / path_of(dashboard).relative_to(Path(__file__).parents[2])
        if not path.is_file() or path.read_text() != render(dashboard):
            yield f"{path.name}: is not what deploy.monitoring.panels says; python -m deploy.monitoring.check --write"
        for _, panels in dashboard.rows:
            for panel in panels:
                for expression, _ in panel.queries:
                    yield from _unknown(f"{dashboard.title}: {panel.title}", expression, documented)


def _rule_problems(rules: list[dict[str, Any]], documented: set[str]) -> Iterator[str]:
    for rule in rules:
        yield from _unknown(f"{RULES}: {rule['alert']}", rule["expr"], documented)


def _runbook_problems(rules: list[dict[str, Any]], runbook: str) -> Iterator[str]:
    sections = set(re.findall(r"^## (\w+)$", runbook, re.MULTILINE))
    alerts = {rule["alert"] for rule in rules}
    yield from (f"{RUNBOOK}: no section {name}" for name in sorted(alerts - sections))
    yield from (f"{RUNBOOK}: no alert {name}" for name in sorted(sections - alerts))
    for rule in rules:
        if rule["annotations"]["runbook_url"] != f"{RUNBOOK}#{rule['alert'].lower()}":
            yield f"{RULES}: {rule['alert']}: runbook_url is not {RUNBOOK}#{rule['alert'].lower()}"


def main() -> int:
    """Print the problems of this source tree; returns 1 if there are any."""
    if sys.argv[1:] == ["--write"]:
        write_dashboards()
    problems = check_monitoring(Path(__file__).resolve().parents[2])
    print("\n".join(problems) if problems else "dashboards and rules: all that they name exists")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
