"""Checks of a Dockerfile against the source tree that it is built from."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PIN = re.compile(r"^([\w.-]+)==([^\s;]+)[^\n]*((?:\n +--hash=sha256:[0-9a-f]{64}[ \\]*)*)", re.MULTILINE)
_NAME = re.compile(r"[\w.-]+")
# The lock of what builds the project's own packages.
_BUILD = "build"
_OWN = frozenset({"loraplex", "loraplex-client"})
_INSTRUCTIONS = frozenset(
    {"FROM", "RUN", "CMD", "EXPOSE", "ENV", "ADD", "COPY", "ENTRYPOINT", "USER", "WORKDIR", "ARG"}
)


def lock_problems(name: str, root: Path, project: Mapping[str, Any]) -> Iterator[str]:
    """Return the problems of a lock, one line each: compared with pyproject.toml and constraints.txt."""
    path = root / name
    if not path.is_file():
        yield f"no lock {name}: run `make lock`"
        return
    pins = {_normal(pin[1]): pin for pin in _PIN.finditer(path.read_text())}
    for required in _requirements(path.stem, project):
        if required not in pins:
            yield f"{name}: {required} of pyproject.toml is missing: run `make lock`"
    for pin in _PIN.finditer((root / "constraints.txt").read_text()):
        locked = pins.get(_normal(pin[1]))
        if locked is not None and locked[2] != pin[2]:
            yield f"{name}: {locked[0].split()[0]}, but in constraints.txt {pin[1]} is {pin[2]}: run `make lock`"
    yield from (f"{name}: {one} has no hash: run `make lock`" for one, pin in pins.items() if not pin[3])


def _requirements(lock: str, project: Mapping[str, Any]) -> set[str]:
    """Return the names of what a lock is for: the build system's, or the project's with some extras."""
    listed = project["build-system"]["requires"]
    if lock != _BUILD:
        extras = project["project"]["optional-dependencies"]
        listed = [
            *project["project"]["dependencies"],
            *(one for extra in lock.split(",") for one in extras.get(extra, ())),
        ]
    names = (_NAME.match(one) for one in listed)
    return {_normal(name[0]) for name in names if name} - _OWN


def _normal(name: str) -> str:
    """Return a package's name as the index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Instruction:
    """An instruction with the number of its first line; `arguments` are its words without --flags."""

    line: int
    name: str
    text: str

    @property
    def flags(self) -> dict[str, str]:
        """Return the instruction's --key=value flags."""
        pairs = (word[2:].partition("=") for word in self.text.split() if word.startswith("--"))
        return {key: value for key, _, value in pairs}

    @property
    def arguments(self) -> list[str]:
        """Return the instruction's words without flags."""
        return [word for word in shlex.split(self.text) if not word.startswith("--")]


def read_instructions(text: str) -> Iterator[Instruction]:
    """Parse the instructions, with continued lines joined and comments dropped."""
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or joined):
            continue
        start = start or number
        joined += line.removesuffix("\\").strip() + " "
        if not line.endswith("\\"):
            name, _, rest = joined.strip().partition(" ")
            yield Instruction(start, name.upper(), rest.strip())
            joined, start = "", 0


def dockerfile_problems(path: Path, root: Path, arguments: Mapping[str, str]) -> Iterator[str]:
    """Return the file's problems in a build from `root` with these build arguments, one line each."""
    shown = path.relative_to(root)
    instructions = list(read_instructions(path.read_text()))
    if not instructions or instructions[0].name not in ("FROM", "ARG"):
        yield f"{shown}: does not begin with FROM"
    stages: list[str] = []
    known_arguments: set[str] = set()
    user = "root"
    for at in instructions:
        where = f"{shown}:{at.line}"
        if at.name not in _INSTRUCTIONS:
            yield f"{where}: unknown instruction {at.name}"
        elif at.name == "FROM":
            user = "root"
            yield from (f"{where}: {problem}" for problem in _from_problems(at, stages))
        elif at.name == "ARG":
            known_arguments.add(at.arguments[0].partition("=")[0])
        elif at.name == "USER":
            user = at.arguments[0]
        elif at.name in ("COPY", "ADD"):
            yield from (f"{where}: {problem}" for problem in _copy_problems(at, stages, root))
    if user.partition(":")[0] in ("root", "0"):
        yield f"{shown}: the last stage runs as root; give it a USER"
    yield from (
        f"{shown}: build argument {name} is not an ARG of it" for name in arguments if name not in known_arguments
    )
    yield from _install_problems(str(shown), instructions, root, arguments)


def _from_problems(instruction: Instruction, stages: list[str]) -> Iterator[str]:
    words = instruction.arguments
    if words[0] not in stages and not is_pinned(words[0]):
        yield f"image {words[0]} has no version"
    stages.append(words[2] if len(words) == 3 and words[1].upper() == "AS" else str(len(stages)))


def _copy_problems(instruction: Instruction, stages: list[str], root: Path) -> Iterator[str]:
    source_stage = instruction.flags.get("from")
    if source_stage is not None:
        if source_stage not in stages:
            yield f"no stage {source_stage}"
        return
    for source in instruction.arguments[:-1]:
        if not (root / source).exists():
            yield f"no file or directory {source}"


def _install_problems(
    shown: str, instructions: list[Instruction], root: Path, arguments: Mapping[str, str]
) -> Iterator[str]:
    """Check that a `pip wheel` has the sources, and that each lock of a `pip install` exists and is complete."""
    copied = {
        source for at in instructions if at.name == "COPY" for source in at.arguments[:-1] if "from" not in at.flags
    }
    project = tomllib.loads((root / "pyproject.toml").read_text())
    for at in (at for at in instructions if at.name == "RUN"):
        words, where = at.arguments, f"{shown}:{at.line}"
        if "pip wheel" in at.text:
            needed = {*project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], "pyproject.toml", "protos"}
            needed.add(project["project"]["readme"])
            yield from (f"{where}: builds without a copy of {name}" for name in sorted(needed - copied))
        for name in (_expand(words[place + 1], arguments) for place, word in enumerate(words) if word == "-r"):
            if str(Path(name).parent) not in copied:
                yield f"{where}: installs without a copy of {name}"
            yield from (f"{where}: {problem}" for problem in lock_problems(name, root, project))
        for command in at.text.split("&&"):
            if "pip install" in command and "--no-index" not in command and "--require-hashes" not in command:
                yield f"{where}: installs without --require-hashes"


def _expand(text: str, arguments: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda match: arguments.get(match.group(1), ""), text)


def is_pinned(image: str) -> bool:
    """Return whether an image's name has a version."""
    tag = image.rpartition("/")[2].partition(":")[2]
    return "@sha256:" in image or tag not in ("", "latest")
