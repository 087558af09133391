"""docs/reference/metrics.md has every metric, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loraplex.adapter_store.metrics import StoreMetrics
from loraplex.batch_runner.metrics import RunnerMetrics
from loraplex.gateway.endpoint import GatewayMetrics
from loraplex.operator.app import OperatorMetrics
from loraplex.operator.scaler.app import ScalerMetrics
from loraplex.router.metrics import RouterMetrics
from loraplex.runtime.telemetry.metrics import Meters
from loraplex.worker.io.metrics import WorkerMetrics

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
# Name, processes in the table of several, and the kind where it is a histogram.
ROW = re.compile(r"^[|-] `(loraplex_\w+)(?:\{[\w,]+\})?`(?: \| (all|Router, .*?) \||:)\s(histogram:)?", re.MULTILINE)


def documented(section: str) -> dict[str, str]:
    """Return the kinds of a process's metrics by their names."""
    own, shared = (PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0] for title in (section, "In several processes"))
    rows = ROW.findall(own)
    assert len(rows) == own.count("\n- `")
    rows += [row for row in ROW.findall(shared) if row[1] == "all" or section in row[1].split(", ")]
    kinds = {
        name: "counter" if name.endswith("_total") else "histogram" if histogram else "gauge"
        for name, _, histogram in rows
    }
    assert len(kinds) == len(rows)
    return kinds


@pytest.mark.parametrize(
    ("section", "process"),
    [
        ("Router", RouterMetrics),
        ("Worker", WorkerMetrics),
        ("Adapter store", StoreMetrics),
        ("Gateway", GatewayMetrics),
        ("Runner", RunnerMetrics),
        ("Scaler", ScalerMetrics),
        ("Operator", OperatorMetrics),
    ],
)
def test_every_metric_is_in_the_docs_and_every_one_in_the_docs_exists(section: str, process: type[Meters]) -> None:
    found = {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in process().registry.collect()
    }
    assert len(found) > 3
    assert documented(section) == found
