"""Draws the dashboards with a cluster's own figures, for docs/plots: `python -m bench.dashboards [--quick]`.

A Prometheus scrapes a cluster under load, in which a worker is killed and a tenant is over its plan. Each query of the
dashboards' JSON files is asked of it, and the panels are drawn by the load tester's charts, in the order in which
Grafana has them. Ends with 1 and the names of panels without data. Needs `prometheus` and a Chromium on PATH.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.dashboard_load import loaded_cluster
from bench.devtools import browser_page
from bench.monitoring import BYTES, COUNT, DASHBOARDS, PER_SECOND, SECONDS, SHARE, path_of
from bench.pictures import PLOTS
from bench.prometheus import Line, Prometheus, scraping
from bench.report import progress
from bench.screenshots import NoBrowserError, find_browser
from loraplex.loadtest.charts import Axis, Series, line_chart
from loraplex.loadtest.report import draw_svg, with_own_ids

# Seconds under load.
_SECONDS, _QUICK_SECONDS = 180.0, 40.0
_WIDTH = 1280
# Values that Grafana puts in place of its variables: 4 scrapes, and all tenants and adapters.
_VARIABLES = {"$__rate_interval": "8s", "$tenant": ".+", "$adapter": ".+"}
# Titles of rows that are a variable, while it has all values.
_ALL = {"$tenant": "All tenants", "$adapter": "All adapters"}
# Titles of the axes of Grafana's units, and the value that is 1 there.
_UNITS = {
    SECONDS: ("seconds", 1.0),
    SHARE: ("share", 1.0),
    BYTES: ("MiB", 2.0**20),
    COUNT: ("", 1.0),
    PER_SECOND: ("a second", 1.0),
}
_STYLE = """body { margin: 0; padding: 20px 24px 30px; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 24px; } h2 { margin: 20px 0 6px; font-size: 18px; border-top: 1px solid var(--rule); }
p { margin: 0; color: var(--dim); font-size: 13px; }
.panels { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
figure { margin: 0; padding: 8px 10px; min-width: 0; background: var(--panel); border-radius: 6px; }
figcaption { font-weight: 600; font-size: 14px; }
svg { width: 100%; height: auto; }"""


def main() -> int:
    """Draw all dashboards; returns 1 if a panel has no data, 2 without the programs."""
    parser = argparse.ArgumentParser(prog="python -m bench.dashboards", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short run that shows that it works, without pictures")
    quick = parser.parse_args().quick
    try:
        with tempfile.TemporaryDirectory(prefix="loraplex-dashboards-") as directory:
            empty = asyncio.run(_draw_all(find_browser(), Path(directory), quick=quick))
    except (NoBrowserError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in empty:
        print(f"no data: {name}", file=sys.stderr)
    return 1 if empty else 0


async def _draw_all(browser: str, directory: Path, *, quick: bool) -> list[str]:
    """Draw every dashboard; returns the panels without data."""
    seconds = _QUICK_SECONDS if quick else _SECONDS
    empty: list[str] = []
    async with loaded_cluster(directory, seconds) as load, scraping(load.targets, directory) as prometheus:
        progress(f"{seconds:g} s of load")
        start = time.time()
        await load.run()
        for dashboard in DASHBOARDS:
            document = json.loads(path_of(dashboard).read_text())
            page = directory / f"{dashboard.uid}.html"
            text, without = await dashboard_page(document, prometheus, start, time.time())
            page.write_text(text, encoding="utf-8")
            empty += without
    async with browser_page(browser) as tab:
        for dashboard in DASHBOARDS:
            await tab.open((directory / f"{dashboard.uid}.html").as_uri())
            where = directory if quick else PLOTS
            await tab.save(where / f"dashboard-{dashboard.uid.removeprefix('loraplex-')}.png", width=_WIDTH)
    return empty


async def dashboard_page(
    document: Mapping[str, Any], prometheus: Prometheus, start: float, end: float
) -> tuple[str, Sequence[str]]:
    """Return a dashboard as HTML, and the names of its panels without data."""
    parts: list[str] = []
    empty: list[str] = []
    for panel in document["panels"]:
        title = html.escape(_ALL.get(panel["title"], panel["title"]))
        if panel["type"] == "row":
            parts.append(f"{'</div>' if parts else ''}<h2>{title}</h2><div class=panels>")
            continue
        unit, one = _UNITS[panel["fieldConfig"]["defaults"]["unit"]]
        lines = [
            Series(_legend(target["legendFormat"], line), [(at - start, value / one) for at, value in line.points])
            for target in panel["targets"]
            for line in await prometheus.lines(filled(target["expr"]), start, end)
            if line.points
        ]
        if not lines:
            empty.append(f"{document['title']}: {panel['title']}")
        chart = line_chart(Axis("seconds"), Axis(unit), lines)
        drawn = with_own_ids(draw_svg(chart), str(panel["id"])) if lines else "no data"
        parts.append(f"<figure><figcaption>{title}</figcaption>{drawn}</figure>")
    colours = (Path(__file__).parents[1] / "clients/loraplex/gateway/page/colours.css").read_text(encoding="utf-8")
    head = (
        f"<!doctype html><meta charset=utf-8><style>{colours}{_STYLE}</style><h1>{html.escape(document['title'])}</h1>"
    )
    note = (
        "<p>The dashboard's queries, asked of a Prometheus and drawn by python -m bench.dashboards, not by Grafana.</p>"
    )
    return f"{head}{note}{''.join(parts)}</div>", empty


def filled(expression: str) -> str:
    """Return a query with values in place of Grafana's variables."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def _legend(form: str, line: Line) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: line.labels.get(found[1], ""), form)


if __name__ == "__main__":
    sys.exit(main())
