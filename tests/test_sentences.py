"""Test that docstrings of every room name their object: none begins with a pronoun or a question word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = (
    "adapter_store",
    "artifacts",
    "bench",
    "broker",
    "clients",
    "deploy",
    "examples",
    "files",
    "router",
    "rpc",
    "telemetry",
    "tests",
    "worker",
)
GENERATED = ROOT / "clients/python/gen"
# "It waits ..." does not say what waits; "Whether ..." and "Why ..." are fragments: "Return whether ...".
VAGUE = re.compile(r"(It|Its|The same|One|Wh(at|atever|ich|o|oever|ose|om|ether|y|en|ere)|How)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def vague_docstrings(path: Path) -> Iterator[str]:
    """Yield `path:line: docstring` for each docstring of the file that begins vaguely."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, DOCUMENTED):
            docstring = ast.get_docstring(node) or ""
            if VAGUE.match(docstring):
                yield f"{path.relative_to(ROOT)}:{node.body[0].lineno}: {docstring.splitlines()[0]}"


def python_files(room: str) -> list[Path]:
    """Return the files of a room that people write."""
    return sorted(path for path in (ROOT / room).rglob("*.py") if not path.is_relative_to(GENERATED))


@pytest.mark.parametrize("room", ROOMS)
def test_no_docstring_begins_vaguely(room: str) -> None:
    found = [line for path in python_files(room) for line in vague_docstrings(path)]
    assert not found, "\n".join(found)
