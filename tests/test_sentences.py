"""Docstrings name their object: none begins with a pronoun or a question word, which no rule of ruff says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Folders of the root that people do not write.
OTHERS = {"gen", "build", "dist"}
GENERATED = ROOT / "clients/python/gen"
# "It waits ..." does not say what waits; "Whether ..." and "Why ..." are fragments: "Return whether ...".
VAGUE = re.compile(r'^ *"""(It|Its|The same|One|Wh(at|atever|ich|o|oever|ose|om|ether|y|en|ere)|How)\b.*', re.MULTILINE)


def test_no_docstring_begins_vaguely() -> None:
    rooms = [room for room in ROOT.iterdir() if room.is_dir() and room.name not in OTHERS and room.name[0] != "."]
    files = [file for room in rooms for file in room.rglob("*.py") if not file.is_relative_to(GENERATED)]
    assert len(files) > 500
    found = [
        f"{file.relative_to(ROOT)}: {match[0].strip()}" for file in files for match in VAGUE.finditer(file.read_text())
    ]
    assert not found, "\n".join(found)
