"""bench.house measures the code; its core and all that is shipped do not grow."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from bench.house import ROOT, Rooms, arrows, circles, core_lines, imports, lines, module, names_twice, read

# Maximum lines of the core and of all that is shipped: lower them with the code.
CORE, PRODUCT = 54_610, 97_670


def test_the_code_does_not_grow() -> None:
    rooms = Rooms.read()
    counts = lines(read(), rooms)
    assert core_lines(counts, rooms) <= CORE
    assert counts.total() <= PRODUCT


def test_make_check_knows_the_tests_of_each_room() -> None:
    tests = dict(re.findall(r"^TESTS\.(\w+) := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert tests.keys() == {room.removeprefix("loraplex.") for room in Rooms.read().names}
    assert [path for paths in tests.values() for path in paths.split() if not (ROOT / "tests" / path).exists()] == []


def test_modules_have_the_names_that_imports_use() -> None:
    assert module(Path("router/loraplex/router/api/__init__.py")) == "loraplex.router.api"
    assert module(Path("loraplex/contracts/plans.py")) == "loraplex.contracts.plans"
    assert module(Path("clients/python/loraplex_client/calls.py")) == "loraplex_client.calls"


def test_imports_in_functions_and_for_types_are_arrows_and_circles_too() -> None:
    sources = {
        "loraplex.router": "class Call: ...",
        "loraplex.router.app": "def run():\n    from loraplex.router import api\nclass Plan: ...",
        "loraplex.router.api": "if TYPE_CHECKING:\n    from loraplex.router.app import run\nclass Plan: ...",
        "loraplex.contracts.plans": "import loraplex.router.app\nclass Call: ...\nclass _Row: ...",
        "loraplex.contracts.options": "class _Row: ...",
    }
    trees = {name: ast.parse(text) for name, text in sources.items()}
    rooms = Rooms([["loraplex.router"], ["loraplex.contracts"]], ["loraplex.router", "loraplex.contracts"], [])
    assert arrows(imports(trees), rooms) == {("loraplex.contracts", "loraplex.router")}
    assert circles(imports(trees)) == [("loraplex.router.api", "loraplex.router.app")]
    assert names_twice(trees) == ["Call", "Plan"]
