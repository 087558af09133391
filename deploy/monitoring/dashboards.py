"""Write the dashboards' JSON files for Grafana: `python -m deploy.monitoring.dashboards`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.monitoring.panels import DASHBOARDS, Dashboard, Panel

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
# Grafana's grid has 24 columns: three charts beside each other.
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
# Version of the JSON's layout, which newer versions of Grafana migrate.
_SCHEMA = 39
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def main() -> None:
    """Write every dashboard."""
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


if __name__ == "__main__":
    main()
