"""The pictures of the dashboards: every query is asked with its variables filled, and panels without data are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.dashboards import dashboard_page, filled, main
from bench.monitoring import ADAPTER, DASHBOARDS, path_of
from bench.prometheus import Line

DOCS = Path(__file__).parents[2] / "docs"


class Answers:
    """Stands for Prometheus: answers every query but those of a metric with one line."""

    async def lines(self, expression: str, start: float, end: float) -> list[Line]:
        """See Prometheus."""
        return [] if "adapter_bytes" in expression else [Line({"tenant": "<b>"}, [(start, 1.0), (end, 2.0)])]


async def test_a_panel_is_drawn_and_one_without_data_is_named() -> None:
    prometheus: Any = Answers()
    document = json.loads(path_of(ADAPTER).read_text())
    shown = ("$adapter", "Answered requests, by tenant", "Bytes, by tier")
    document["panels"] = [panel for panel in document["panels"] if panel["title"] in shown]
    page, empty = await dashboard_page(document, prometheus, 0.0, 60.0)
    assert page.count("<figure>") == 2
    assert page.count("<svg") == 1
    assert "All adapters" in page
    assert "<b>" not in page
    assert empty == ["Loraplex: adapters: Bytes, by tier"]


def test_queries_are_asked_without_variables() -> None:
    for dashboard in DASHBOARDS:
        for panel in json.loads(path_of(dashboard).read_text())["panels"]:
            for target in panel.get("targets", ()):
                assert "$" not in filled(target["expr"])


def test_every_dashboard_has_a_picture() -> None:
    runbook = (DOCS / "guides" / "runbook.md").read_text(encoding="utf-8")
    for dashboard in DASHBOARDS:
        name = f"plots/dashboard-{dashboard.uid.removeprefix('loraplex-')}.png"
        assert f"(../{name})" in runbook
        assert 1_000 < (DOCS / name).stat().st_size <= 300_000


def test_without_its_programs_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["dashboards"])
    assert main() == 2
    assert capsys.readouterr().err.startswith("error: no browser: ")
