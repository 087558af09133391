"""The spine of docs/request-life.md: the files that hand a request on, and its tokens back, are few, short and linked.

Each item of the list under "The spine" begins with a link to its file. A file comes after the one above it, or after an
earlier file that its item names with a further link (the way back begins at one of them). The two know each other: one
imports the other, or a chain of imports through the files, packages and protos that the item links to leads from one to
the other.
"""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/request-life.md"
MOST_FILES, MOST_LINES = 16, 500
LINK = re.compile(r"\]\(\.\./([\w/.-]+)\)")


@dataclass(frozen=True)
class Item:
    """An item of the list: its file, and the further files that it links to; paths from the root."""

    path: str
    named: tuple[str, ...]


def read_spine(text: str) -> list[Item]:
    """Read the numbered list under the heading; an item may go on over indented lines."""
    section = text.partition("\n## The spine\n")[2].partition("\n## ")[0]
    items = re.findall(r"^\d+\. (.*(?:\n {2,}.*)*)", section, flags=re.MULTILINE)
    links = [LINK.findall(item) for item in items]
    return [Item(path, tuple(named)) for path, *named in links]


@cache
def imported(path: str) -> frozenset[str]:
    """Return the dotted names that a file imports: modules, and what it takes from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def imports(path: str, other: str) -> bool:
    """Tell whether a Python file imports the module of another, a package (`folder/`), or the stubs of a proto."""
    module = re.sub(r"\.py$|\.proto$|/$", "", other.removeprefix("protos/")).replace("/", ".")
    stubs = {f"{module}_pb2", f"{module}_pb2_grpc"}
    return bool(imported(path) & (stubs if other.endswith(".proto") else {module}))


def know_each_other(path: str, other: str) -> bool:
    """Tell whether one of two files imports the other."""
    return any(
        importing.endswith(".py") and imports(importing, target) for importing, target in ((path, other), (other, path))
    )


def are_linked(before: str, after: str, named: tuple[str, ...]) -> bool:
    """Tell whether a chain of files that know each other leads from one to the other, through named files alone."""
    reached, ahead = {before}, [before]
    for path in ahead:  # grows while it is read
        found = [other for other in (after, *named) if other not in reached and know_each_other(path, other)]
        reached.update(found)
        ahead += found
    return after in reached


SPINE = read_spine(PAGE.read_text(encoding="utf-8"))


def test_the_list_is_read_with_its_links() -> None:
    items = "1. [a](../x/a.py): first,\n   then on\n2. [b](../x/b.py) by [c](../x/c.proto)\n"
    page = f"# Life\n\n## The spine\n\n{items}\n## More\n\n1. [d](../d.py)\n"
    assert read_spine(page) == [Item("x/a.py", ()), Item("x/b.py", ("x/c.proto",))]


def test_the_spine_has_few_files() -> None:
    assert 2 <= len(SPINE) <= MOST_FILES
    assert len({item.path for item in SPINE}) == len(SPINE)


@pytest.mark.parametrize("path", [item.path for item in SPINE])
def test_a_file_of_the_spine_is_short(path: str) -> None:
    lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES


@pytest.mark.parametrize(
    ("above", "item"), [pytest.param(above, item, id=item.path) for above, item in itertools.pairwise(SPINE)]
)
def test_a_file_of_the_spine_knows_the_one_before_it(above: Item, item: Item) -> None:
    earlier = [other.path for other in SPINE[: SPINE.index(item)] if other.path in item.named]
    linked = [before for before in (above.path, *earlier) if are_linked(before, item.path, item.named)]
    assert linked, f"{item.path} and {above.path} do not import each other, nor are they linked by what the item names"


def test_files_that_nothing_links_are_found() -> None:
    assert not are_linked("worker/engine/torch_engine.py", "worker/engine/lora/cpu/group.py", ())
    assert not are_linked("router/dispatch/relay.py", "worker/io/relay/links.py", ("worker/ipc.py",))
