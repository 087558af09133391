"""Mistakes in copies of the shipped files, for the tests of the checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path


def expect_problem(
    check: Callable[[Path], Sequence[str]], tree: Path, name: str | Path, old: str, new: str, problem: str
) -> None:
    """Replace a text in a file of a tree, and expect that a check of the tree names the problem, on one line."""
    text = (tree / name).read_text()
    assert old in text, "the mistake can't be made: the file has changed"
    (tree / name).write_text(text.replace(old, new))
    problems = check(tree)
    assert any(problem in line for line in problems), problems
    assert all("\n" not in line for line in problems)
