"""The size and the shape of the code: `python -m bench.house [--json FILE]`.

Lines of Python and Lua by room, as git lists the files; rooms, floors and arrows of the package `loraplex`, as the
first contract of import-linter in pyproject.toml defines rooms; circles of two files; class names that stand twice; and
what people have to read: words, settings, parameters of commands, Redis keys and methods. The core is what a request
needs, the edge the packages that it does not import, by the contract CORE. The command and the SDK are clients.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Folders of what is shipped; the others are tests, benchmarks and examples.
PRODUCT = ("loraplex", "router", "worker", "adapter_store", "clients")
# Name of the contract of import-linter that lists the core's rooms and the edge packages.
CORE = "The core imports no edge package"
# Kinds of a room, in the order of the table.
KINDS = ("core", "edge", "client")


@dataclass(frozen=True)
class Rooms:
    """The modules that are rooms, by floor from the top, and those of the core and the edge."""

    floors: Sequence[Sequence[str]]
    core: Sequence[str]
    edge: Sequence[str]

    @classmethod
    def read(cls) -> Rooms:
        """Read them from pyproject.toml."""
        contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        boundary = next(one for one in contracts if one["name"] == CORE)
        layers = [[room for room in layer.split(" | ") if "." in room] for layer in contracts[0]["layers"]]
        return cls([rooms for rooms in layers if rooms], boundary["source_modules"], boundary["forbidden_modules"])

    @property
    def names(self) -> list[str]:
        """Return all rooms."""
        return [room for floor in self.floors for room in floor]

    def room(self, module: str) -> str | None:
        """Return the room that a module belongs to."""
        return next((room for room in self.names if f"{module}.".startswith(f"{room}.")), None)

    def kind(self, room: str) -> str:
        """Return which of KINDS a room is."""
        return "core" if room in self.core else "edge" if room in self.edge else "client"


def read() -> dict[Path, str]:
    """Return the text of the product's files of Python and Lua, as git lists them."""
    paths = map(Path, _git_files(*PRODUCT))
    return {path: (ROOT / path).read_text() for path in paths if path.suffix in (".py", ".lua")}


def lines(sources: Mapping[Path, str], rooms: Rooms) -> Counter[str]:
    """Return the lines by room, of the SDK, and of other files by their first name."""
    counts = Counter[str]()
    for path, text in sources.items():
        name = module(path)
        counts[rooms.room(name) or name.partition(".")[0]] += text.count("\n")
    return counts


def core_lines(counts: Mapping[str, int], rooms: Rooms) -> int:
    """Return the lines of the core of `lines`."""
    return sum(counts[room] for room in rooms.core)


def module(path: Path) -> str:
    """Return the dotted name of a file; the package's folder may lie in another, as router/loraplex does."""
    parts = path.with_suffix("").parts
    package = next((name for name in ("loraplex", "loraplex_client") if name in parts), parts[0])
    return ".".join(parts[parts.index(package) :]).removesuffix(".__init__")


def arrows(imports: Mapping[str, Iterable[str]], rooms: Rooms) -> set[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports the second."""
    pairs = {(rooms.room(name), rooms.room(other)) for name, others in imports.items() for other in others}
    return {(room, other) for room, other in pairs if room and other and room != other}


def circles(imports: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """Return the pairs of modules that import each other."""
    pairs = {(name, other) for name, others in imports.items() for other in others}
    return sorted((name, other) for name, other in pairs if name < other and (other, name) in pairs)


def imports(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return which of the modules each module imports, in functions and for types alone too."""
    return {name: {*_imported(tree, trees)} - {name} for name, tree in trees.items()}


def _imported(tree: ast.Module, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):  # ruff allows no relative ones
            for alias in node.names:
                candidates = (f"{node.module}.{alias.name}", str(node.module))
                yield from [one for one in candidates if one in modules][:1]


def names_twice(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return the names of public classes of the package that stand in several files; the SDK has its own."""
    classes = {name: {n.name for n in tree.body if isinstance(n, ast.ClassDef)} for name, tree in trees.items()}
    files = Counter(one for name, found in classes.items() if name.startswith("loraplex.") for one in found)
    return sorted(name for name, count in files.items() if count > 1 and not name.startswith("_"))


def measure() -> dict[str, dict[str, Any]]:
    """Return the rows of the table by section."""
    sources, rooms = read(), Rooms.read()
    counts = lines(sources, rooms)
    trees = {module(path): ast.parse(text) for path, text in sources.items() if path.suffix == ".py"}
    imported = imports(trees)
    pairs, twice = circles(imported), names_twice(trees)
    kinds: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for room in rooms.names:
        kinds[rooms.kind(room)][room.removeprefix("loraplex.")] = counts[room]
    kinds["client"]["SDK"] = counts["loraplex_client"]
    sums = {kind: sum(found.values()) for kind, found in kinds.items()}
    others = {"other": counts.total() - sum(sums.values()), "product": counts.total()}
    return {
        **{f"lines, {kind}": found for kind, found in kinds.items()},
        "lines": {**sums, **others},
        "shape": {
            "rooms": len(rooms.names),
            "edge packages among them": len(rooms.edge),
            "floors": len(rooms.floors),
            "arrows between rooms": len(arrows(imported, rooms)),
            "circles of two files": len(pairs),
            "class names that stand twice": len(twice),
        },
        "to read": to_read(),
        "circles": dict(pairs),
        "class names that stand twice": dict.fromkeys(twice, ""),
    }


def to_read() -> dict[str, int]:
    """Return what users and operators have to know, and the words of the pages."""

    def count(pattern: str, *files: str) -> int:
        return sum(len(re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)) for file in files)

    commands = [*_commands()]
    return {
        "words in docs/": count(r"\S+", *_git_files("docs/**.md")),
        "settings": count(r"^- `--", "docs/reference/settings.md"),
        "commands": len(commands),
        "parameters of commands": sum(commands),
        "Redis keys": count(r"^lp:", "loraplex/contracts/broker/keys.py"),
        "gRPC methods": count(r"^  rpc ", *_git_files("protos")),
    }


def _commands() -> Iterator[int]:
    """Yield the number of parameters of each command."""
    import typer

    from loraplex.cli.__main__ import app

    commands: list[Any] = [typer.main.get_command(app)]
    while commands:
        command = commands.pop()
        below = getattr(command, "commands", {}).values()
        commands += below
        if not below:
            yield len(command.params)


def _git_files(*patterns: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [*filter(None, listed.stdout.split("\0"))]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.house", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the values there")
    arguments = parser.parse_args()
    sections = measure()
    if arguments.json:
        arguments.json.write_text(json.dumps(sections, indent=2) + "\n")
    if sys.stdout.isatty():
        _print_table(sections)
        return
    for section, rows in sections.items():
        for name, value in rows.items():
            print(section, name, value, sep="\t")


def _print_table(sections: Mapping[str, Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    table.add_column("", justify="right")
    for section, rows in sections.items():
        for number, (name, value) in enumerate(rows.items()):
            shown = f"{value:,}" if isinstance(value, int) else value
            table.add_row("" if number else section, name, shown)
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
