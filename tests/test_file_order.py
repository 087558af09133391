"""The order of the tests' files names what exists."""

from __future__ import annotations

from pathlib import Path

from tests.file_order import LONGEST, TOGETHER, unit

ROOT = Path(__file__).parents[1]


def test_every_path_exists() -> None:
    assert [path for path in (*LONGEST, *TOGETHER) if not (ROOT / path).exists()] == []


def test_a_folder_that_shares_a_cluster_runs_in_one_process() -> None:
    assert unit("tests/e2e/answers/test_tokens.py::test_a[1]") == unit("tests/e2e/answers/test_ends.py::test_b")
    assert unit("tests/rpc/test_edge.py::test_a") == "tests/rpc/test_edge.py"
