"""The report's page, its plots, and the comparison of two reports."""

from __future__ import annotations

import json
import re
from array import array
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from loraplex.cli.loadtest import failures
from loraplex.loadtest.arrivals import Closed, Extent
from loraplex.loadtest.charts import MAX_TICKS, Axis, Stream, timetable
from loraplex.loadtest.decoding import PlanError
from loraplex.loadtest.draws import power_law
from loraplex.loadtest.fleet import LoadRun
from loraplex.loadtest.generator import Share
from loraplex.loadtest.plan import LoadPlan, Tenant
from loraplex.loadtest.report import (
    javascript,
    milliseconds,
    read_report,
    render_page,
    report_plots,
    whole_report,
    write,
)
from loraplex.loadtest.runs import run_report, warnings
from loraplex.loadtest.samples import Outcome, Recorder, Samples
from loraplex.loadtest.statistics import spread

SVG = "http://www.w3.org/2000/svg"
NASTY = "<script>alert('&')</script>"
PLAN = LoadPlan(
    NASTY,
    Closed(2),
    Extent(40),
    (Tenant("acme", adapters=power_law(("a", NASTY), 1.0)), Tenant("globex")),
    sweep=(2, 4),
)


def point(plan: LoadPlan, label: str, slower: float = 1.0) -> tuple[dict[str, Any], Samples]:
    recorder = Recorder()
    for index in range(40):
        begin, gap = index * 0.1, 0.01 * slower * (1 + index % 3)
        recorder.add(
            Outcome(
                index, index % 2, index % 2 if index % 2 == 0 else -1, begin, begin, "OK" if index % 10 else NASTY,
                begin + 0.02, begin + 0.02 + 2 * gap, begin + 0.03 + 2 * gap, 3, 3, gap, adapter_s=0.0, queue_s=0.0,
                gaps_s=array("d", [gap, gap]), message="" if index % 10 else f"{NASTY} {index}",
            )
        )  # fmt: skip
    share = Share(recorder.samples(), 0.5, 4.0, array("d", [0.001] * 9), 0, float("nan"))
    return run_report(label, plan, LoadRun((share,), 1.7e9, interrupted=False))


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    runs = [point(one, label, slower)[0] for (label, one), slower in zip(PLAN.points(), (1.0, 2.0), strict=True)]
    return whole_report(PLAN, "127.0.0.1:1", "loraplex loadtest", runs)


@pytest.fixture(scope="module")
def page(report: dict[str, Any]) -> str:
    return render_page(report, report_plots(report["runs"]))


class Tags(HTMLParser):
    """Checks that tags nest, and keeps each start tag and each script's content."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.started: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.started.append((tag, dict(attributes)))
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.started.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def test_the_page_needs_no_other_file_and_escapes_names(page: str) -> None:
    assert page.count(javascript()) == 1
    rest = page.replace(javascript(), "")
    assert NASTY not in rest
    # The names of SVG's namespaces are not addresses that a browser opens.
    assert not re.search(r"(src|href|url\((?!#)|@import|https?:)", re.sub(r'xmlns(:xlink)?="[^"]*"', "", rest))
    tags = Tags()
    tags.feed(rest)
    assert tags.open == []
    pictures = [attributes for tag, attributes in tags.started if tag == "svg"]
    # of the sweep 2, of each of its 2 runs 3 histograms, 2 timelines, the tenants, the streams, one stream
    specs = [json.loads(script) for script in tags.scripts if script.startswith("{")]
    assert len(pictures) == len(specs) == 2 + 2 * 8
    assert all(float(attributes["width"] or 0) == 640 for attributes in pictures)
    assert any(NASTY in json.dumps(spec) for spec in specs)
    ids = [attributes["id"] for _, attributes in tags.started if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert [tag for tag, _ in tags.started].count("table") == 1 + 2 * 5


def test_the_script_is_bundled_once_and_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = iter(("first", "second"))
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda: next(scripts))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [javascript(), javascript()] == ["first", "first"]
    assert len(list((tmp_path / "loraplex").iterdir())) == 1
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert javascript() == "second"


def test_without_a_script_the_page_has_every_figure(report: dict[str, Any], page: str) -> None:
    text = re.sub(r"<(script|svg)\b.*?</\1>", "", page, flags=re.DOTALL)
    for run in report["runs"]:
        for figure in ("p50", "p99", "max"):
            assert f"<td>{milliseconds(run['times']['latency'][figure])}</td>" in text
        assert f"<b>{run['figures']['requests_per_s']:.2f}</b>" in text


def test_the_first_message_of_each_status_is_shown(report: dict[str, Any], page: str) -> None:
    assert [run["messages"] for run in report["runs"]] == [{NASTY: f"{NASTY} 0"}] * 2
    assert page.count('<p class="warn">&lt;script&gt;') == 2


def test_a_run_without_a_success_fails_the_test(report: dict[str, Any]) -> None:
    run = report["runs"][1]
    assert list(failures(run, [])) == []
    none = run | {"figures": run["figures"] | {"ok": 0, "errors": 40}}
    assert list(failures(none, [])) == ["closed loop, 4 at once: none of 40 requests succeeded"]
    left = run | {"figures": run["figures"] | {"ok": 0, "cancelled": 40}}
    assert list(failures(left, [])) == [], "the test itself ended them"


def test_long_streams_are_plotted_in_part() -> None:
    streams = [Stream(str(number), 0.0, 9000.0, [float(at) for at in range(2000)], number, "") for number in range(9)]
    (spans, messages) = (layer["data"]["values"] for layer in timetable(Axis("ms"), streams)["layer"])
    assert {span["row"] for span in spans} == {message["row"] for message in messages} == {0, 1}
    (stream,) = timetable(Axis("ms"), [Stream("", 0.0, 9e3, range(9000), 0, "")])["layer"][1:]
    assert len(stream["data"]["values"]) == MAX_TICKS


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
