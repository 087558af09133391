"""Checks of container command lines against the commands' own --help."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"LORAPLEX_[A-Z_]+")
_ASSIGNMENT = re.compile(r"\w+=")
_SHELL_WORDS = frozenset({"set", "for", "do", "done", "if", "then", "fi", "["})
_HELP_TIMEOUT_S = 120


@dataclass(frozen=True)
class Usage:
    """Flags of a command, and its LORAPLEX_* variables; one that ends in _ is a prefix of flags' names."""

    flags: frozenset[str]
    variables: frozenset[str]
    has_subcommands: bool

    def knows_variable(self, name: str) -> bool:
        """Return whether the command reads this environment variable."""
        prefixed = (prefix for prefix in self.variables if prefix.endswith("_") and name.startswith(prefix))
        named = ("--" + name.removeprefix(prefix).lower().replace("_", "-") for prefix in prefixed)
        return name in self.variables or any(flag in self.flags for flag in named)


@dataclass(frozen=True)
class Invocation:
    """A command of the project with its arguments: a module that python runs, or a console script."""

    shown: str
    module: str
    arguments: tuple[str, ...]


def split_script(text: str) -> Iterator[list[str]]:
    """Return the commands of a plain shell script with one command a line, without the shell's own."""
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] not in _SHELL_WORDS and not _ASSIGNMENT.match(words[0]):
            yield words


def read_invocation(words: Sequence[str], root: Path) -> Invocation | str:
    """Return the project's command in `words`, or a description of the problem with it."""
    if not words:
        return "an empty command"
    if words[0] in ("python", "python3"):
        if len(words) < 3 or words[1] != "-m":
            return f"{shlex.join(words)}: not `python -m MODULE ...`"
        if not _is_module(words[2]):
            return f"python -m {words[2]}: no such module"
        return Invocation(f"python -m {words[2]}", words[2], tuple(words[3:]))
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    if words[0] not in scripts:
        return f"{words[0]}: not a command of this project"
    return Invocation(words[0], scripts[words[0]].partition(":")[0].removesuffix(".__main__"), tuple(words[1:]))


def _is_module(name: str) -> bool:
    try:
        spec = find_spec(name)
        return spec is not None and (
            spec.submodule_search_locations is None or find_spec(f"{name}.__main__") is not None
        )
    except ModuleNotFoundError:
        return False


def find_usage(invocation: Invocation) -> tuple[str, Usage | None]:
    """Return the command with its subcommands, and the innermost one's usage; None if a subcommand does not exist."""
    shown, subcommands = invocation.shown, list[str]()
    usage = _ask(invocation.module, ())
    for word in invocation.arguments:
        if usage is None or not usage.has_subcommands:
            break
        shown, subcommands = f"{shown} {word}", [*subcommands, word]
        usage = _ask(invocation.module, tuple(subcommands))
    return shown, usage


@cache
def _ask(module: str, subcommands: tuple[str, ...]) -> Usage | None:
    environ = {**os.environ, "COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}
    asked = subprocess.run(
        [sys.executable, "-m", module, *subcommands, "--help"],
        capture_output=True,
        text=True,
        env=environ,
        timeout=_HELP_TIMEOUT_S,
        check=False,
    )
    if asked.returncode != 0:
        return None
    has_subcommands = "COMMAND [ARGS]" in asked.stdout  # Typer's usage line for a group of commands.
    return Usage(frozenset(_FLAG.findall(asked.stdout)), frozenset(_VARIABLE.findall(asked.stdout)), has_subcommands)
