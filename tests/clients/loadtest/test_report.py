"""The report's page, its plots, and the comparison of two reports."""

from __future__ import annotations

import copy
import json
import re
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from clients.loadtest.arrivals import Closed, Extent
from clients.loadtest.compare import compare
from clients.loadtest.cost import warnings
from clients.loadtest.fleet import Run
from clients.loadtest.generator import Share
from clients.loadtest.page import page
from clients.loadtest.plan import Plan, Tenant
from clients.loadtest.popularity import power_law
from clients.loadtest.report import read_report, run_report, whole_report, write
from clients.loadtest.samples import Outcome, Recorder, Samples
from clients.loadtest.statistics import spread
from clients.loadtest.svg import linear, logarithmic
from clients.loadtest.table import PlanError

SVG = "http://www.w3.org/2000/svg"
NASTY = "<script>alert('&')</script>"
PLAN = Plan(
    NASTY,
    Closed(2),
    Extent(40),
    (Tenant("acme", adapters=power_law(("a", NASTY), 1.0)), Tenant("globex")),
    sweep=(2, 4),
)


def point(plan: Plan, label: str, slower: float = 1.0) -> tuple[dict[str, Any], Samples]:
    recorder = Recorder()
    for index in range(40):
        begin, gap = index * 0.1, 0.01 * slower * (1 + index % 3)
        recorder.add(
            Outcome(
                index, index % 2, index % 2 if index % 2 == 0 else -1, begin, begin, "OK" if index % 10 else NASTY,
                begin + 0.02, begin + 0.02 + 2 * gap, begin + 0.03 + 2 * gap, 3, 3, gap, adapter_s=0.0, queue_s=0.0,
                gaps_s=array("d", [gap, gap]),
            )
        )  # fmt: skip
    share = Share(recorder.samples(), 0.5, 4.0, array("d", [0.001] * 9), 0, float("nan"))
    return run_report(label, plan, Run((share,), 1.7e9, interrupted=False))


@pytest.fixture
def report() -> dict[str, Any]:
    runs = [point(one, label, slower)[0] for (label, one), slower in zip(PLAN.points(), (1.0, 2.0), strict=True)]
    return whole_report(PLAN, "127.0.0.1:1", "loraplex loadtest", runs)


def test_the_page_stands_alone_and_is_well_formed(report: dict[str, Any]) -> None:
    text = page(report)
    assert NASTY not in text
    # the name of SVG's namespace is no address that anybody asks
    assert not re.search(r"(src|href|url|@import|https?:)", text.replace(SVG, ""))
    document = ElementTree.fromstring(text.removeprefix("<!doctype html>\n"))
    plots = list(document.iter(f"{{{SVG}}}svg"))
    # of the sweep 2, of each of its 2 runs 3 histograms, 2 timelines, the tenants, the streams, one stream
    assert len(plots) == 2 + 2 * 8
    for element in document.iter():
        for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"):
            if element.tag.startswith(f"{{{SVG}}}") and name in element.attrib:
                assert -1 <= float(element.attrib[name]) <= 800, (element.tag, element.attrib)
    for line in document.iter(f"{{{SVG}}}polyline"):
        numbers = [float(number) for number in re.split("[ ,]", line.attrib["points"])]
        assert all(0 <= number <= 640 for number in numbers)


def test_the_files_are_whole(report: dict[str, Any], tmp_path: Path) -> None:
    seen = [(label, point(one, label)[1]) for label, one in PLAN.points()]
    write(tmp_path / "out", report, seen, PLAN)
    assert read_report(tmp_path / "out" / "report.json") == json.loads(json.dumps(report))
    lines = (tmp_path / "out" / "requests.csv").read_text().splitlines()
    assert len(lines) == 1 + 80
    assert lines[2].startswith('"closed loop, 2 at once",1,globex,,0.1,0.1,OK,0.12,')
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "plots",
        "report.html",
        "report.json",
        "requests.csv",
    ]
    plots = sorted((tmp_path / "out" / "plots").iterdir())
    assert len(plots) == 2 + 2 * 8
    assert "sweep-latency-against-throughput.svg" in {path.name for path in plots}
    for path in plots:
        assert ElementTree.parse(path).getroot().tag == f"{{{SVG}}}svg"


def test_compare(report: dict[str, Any]) -> None:
    other = copy.deepcopy(report)
    other["runs"][0]["times"]["ttft"]["p50"] *= 2
    other["runs"][0]["figures"]["tokens_per_s"] *= 1.5
    other["runs"][1]["times"]["itl"]["p99"] = None
    rows = {(row["run"], row["value"]): row for row in compare(report, other)}
    assert len(rows) == 2 * (4 * 3 + 5)
    first = "closed loop, 2 at once"
    assert rows[first, "ttft.p50"]["change"] == pytest.approx(1.0)
    assert rows[first, "ttft.p50"]["better"] is False
    assert rows[first, "tokens_per_s"]["change"] == pytest.approx(0.5)
    assert rows[first, "tokens_per_s"]["better"] is True
    assert rows[first, "itl.p50"]["better"] is None
    assert rows["closed loop, 4 at once", "itl.p99"]["change"] is None
    other["runs"] = other["runs"][:1]
    other["runs"][0]["label"] = "something else"
    with pytest.raises(PlanError, match="no run in common"):
        compare(report, other)
    alone = report | {"runs": report["runs"][:1]}
    assert compare(alone, other)[0]["run"] == "closed loop, 2 at once / something else"


@pytest.mark.parametrize(("content", "says"), [("{", "not JSON"), ("[]", "not a load test's"), (None, "no such file")])
def test_only_a_report_is_read(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "r.json").write_text(content)
    with pytest.raises(PlanError, match=says):
        read_report(tmp_path / "r.json")


def test_a_closed_loop_says_what_it_hides(report: dict[str, Any]) -> None:
    assert all("coordinated omission" in run["notes"][0] for run in report["runs"])


def test_the_generator_warns_of_itself() -> None:
    def told(busy: float, sent_late_s: float, read_late_s: float, ttft_s: float) -> list[str]:
        late = {
            "busy_share": busy,
            "send_delay": spread(np.full(10, sent_late_s)),
            "read_delay": spread(np.full(10, read_late_s)),
        }
        return warnings(late, {"ttft": {"p50": ttft_s}, "itl": {"p99": 0.02}})

    assert told(0.3, 0.004, 0.004, 0.01) == []
    assert told(0.3, 0.02, 0.004, 1.0) == []  # 2% of the time to the first token
    (line,) = told(0.3, 0.02, 0.004, 0.1)
    assert "sent requests up to 20.0 ms late" in line
    (line,) = told(0.3, 0.001, 0.006, 1.0)
    assert "read what had come up to 6.0 ms late" in line
    (line,) = told(0.95, 0.001, 0.001, 1.0)
    assert "95% of a core" in line


def test_axes_name_round_values() -> None:
    assert linear("s", [0.0, 93.0]).ticks() == [0, 25, 50, 75, 100]
    assert logarithmic("ms", [1.0, 900.0]).ticks() == pytest.approx([1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])
    assert replace(linear("count", [11.0]), whole=True).ticks() == [0, 3, 6, 9]
    assert replace(linear("count", [1.0]), whole=True).ticks() == [0, 1]
    for values in ([], [0.0], [1e-9], [5.0, 5.0], [3.0, 4.0]):
        for axis in (linear("s", values), logarithmic("s", values)):
            ticks = axis.ticks()
            assert len(ticks) >= 2
            assert all(-0.01 <= axis.at(tick) <= 1.01 for tick in ticks)
