"""Checks of the images' locks, deploy/docker/locks, which `make lock` writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_PIN = re.compile(r"^([\w.-]+)==([^\s;]+)[^\n]*((?:\n +--hash=sha256:[0-9a-f]{64}[ \\]*)*)", re.MULTILINE)
_NAME = re.compile(r"[\w.-]+")
# The lock of what builds the project's own packages.
_BUILD = "build"
_OWN = frozenset({"loraplex", "loraplex-client"})


def lock_problems(name: str, root: Path, project: Mapping[str, Any]) -> Iterator[str]:
    """Return the problems of a lock, one line each: compared with pyproject.toml and constraints.txt."""
    path = root / name
    if not path.is_file():
        yield f"no lock {name}: run `make lock`"
        return
    pins = {_normal(pin[1]): pin for pin in _PIN.finditer(path.read_text())}
    for wanted in _requirements(path.stem, project):
        if wanted not in pins:
            yield f"{name}: {wanted} of pyproject.toml is missing: run `make lock`"
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
