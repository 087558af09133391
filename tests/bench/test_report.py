"""Reports: aims, the page's tables, and what a wrong page or path answers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from bench.__main__ import NAMES
from bench.command import run_command
from bench.report import Aim, Report
from bench.tables import MarkersMissingError, markdown, rewrite

PAGE = Path(__file__).parents[2] / "docs" / "results" / "benchmarks.md"


def report(name: str) -> Report:
    return Report(
        name,
        f"python -m bench.{name}",
        quick=False,
        setup={},
        rows=[{"case": "ours", "median": 1234.5}, {"case": "theirs", "unit": "GB/s", "median": 2.0}],
        ratios={"speed": 2.5, "gap": 0.3, "share": 0.4},
        aims={"speed": Aim(at_least=3), "gap": Aim(at_most=1), "share": Aim()},
    )


def test_aims_tell_direction_and_whether_they_are_reached() -> None:
    assert (str(Aim(at_least=0.8)), str(Aim(at_most=2.5)), str(Aim())) == (">= 0.8", "<= 2.5", "reported")
    assert Aim(at_least=3).reached(3)
    assert not Aim(at_least=3).reached(2.9)
    assert Aim(at_most=1).reached(1)
    assert not Aim(at_most=1).reached(1.1)
    assert Aim().reached(0)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_a_place_for_every_benchmark(name: str) -> None:
    made = report(name).to_json()  # once: it has the machine's load
    written = rewrite(PAGE.read_text(), made)
    assert "| ours | 1,234.5 |\n| theirs, GB/s | 2 |" in written
    assert "- `speed`: 2.5 (>= 3)\n- `gap`: 0.3 (<= 1)\n<!--" in written
    assert f"`python -m bench.{name}` on " in written
    assert rewrite(written, made) == written


def test_rows_of_other_keys_are_a_table_of_their_own_and_a_page_may_have_rows_of_its_own() -> None:
    rows = [{"case": "a", "us": 1, "n": 2}, {"case": "b", "us": 3}, {"case": "c", "MB": 4}]
    made = replace(report("engine"), rows=rows)
    assert "| a | 1 | 2 |\n| b | 3 |  |\n\n| case | MB |\n| --- | --- |\n| c | 4 |" in markdown(made.to_json())
    assert "| a |" not in markdown(replace(made, page_rows=rows[2:]).to_json())
    assert "|" not in markdown(replace(made, page_rows=[]).to_json())
    same = [{"case": "a", "unit": "us", "median": 1}, {"case": "b", "unit": "us", "median": 3}]
    assert "| case, us | median |\n| --- | --- |\n| a | 1 |\n" in markdown(replace(made, rows=same).to_json())
    spread = [{"case": "a", "median": 2, "low": 1, "high": 12.5, "runs": 3}]
    assert "| case | median |\n| --- | --- |\n| a | 2 |\n" in markdown(replace(made, page_rows=spread).to_json())


def test_a_page_is_written_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(empty := "<!-- bench.engine -->\n<!-- end of bench.engine -->\n")
    drawn: list[Path] = []
    made = replace(report("engine"), draw=lambda: drawn.append(page))
    for flags, code in (([], None), (["--quick", "--write-docs"], 2), (["--write-docs"], None)):
        assert (page.read_text(), drawn) == (empty, [])
        monkeypatch.setattr("sys.argv", ["bench", *flags])
        with pytest.raises(SystemExit) if code else nullcontext():
            run_command("engine", "Something.", lambda quick: made, page)
    assert drawn == [page]
    assert "| ours | 1,234.5 |" in page.read_text()


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(MarkersMissingError, match=r"<!-- bench\.engine -->"):
        rewrite("# Benchmarks", report("engine").to_json())


def test_a_bad_path_ends_it_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--json", str(tmp_path / "missing" / "file.json")])
    with pytest.raises(SystemExit) as ended:
        run_command("engine", "Something.", lambda quick: pytest.fail("it measures"))
    assert ended.value.code == 2
    assert "missing is not a directory" in capsys.readouterr().err
