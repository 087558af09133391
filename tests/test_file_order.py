"""The order of the tests' files names what exists."""

from __future__ import annotations

from pathlib import Path

from tests.file_order import LONGEST, TOGETHER, ordered, rotated, unit

ROOT = Path(__file__).parents[1]


def test_every_path_exists() -> None:
    assert [path for path in (*LONGEST, *TOGETHER) if not (ROOT / path).exists()] == []


def test_a_folder_that_shares_a_cluster_runs_in_one_process() -> None:
    assert unit("tests/e2e/answers/test_tokens.py::test_a[1]") == unit("tests/e2e/answers/test_ends.py::test_b")
    assert unit("tests/rpc/test_edge.py::test_a") == "tests/rpc/test_edge.py"


def test_long_files_come_before_all_short_ones() -> None:
    short, long = "tests/rpc/test_edge.py", ["tests/e2e/test_pins.py", "tests/e2e/test_resume.py"]
    tests = [f"{one}::test" for one in (short, *reversed(long), "tests/e2e/gateway/test_a.py", "tests/a/test_a.py")]
    assert ordered(tests) == ["tests/e2e/gateway/", *long, "tests/a/test_a.py", short]
    assert ordered([tests[0]]) == [short]


def test_each_process_begins_at_a_share_of_its_own() -> None:
    tests = str(ROOT / "tests" / "worker" / "io")
    shares = [rotated([tests, "tests/test_files.py::test[a//b]"], number, 3) for number in range(3)]
    assert len({share[0] for share in shares}) == 3
    assert len({tuple(sorted(share)) for share in shares}) == 1
    assert "tests/test_files.py::test[a//b]" in shares[0]
    assert f"{tests}/adapters" in shares[0]
