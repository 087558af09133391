"""The Lua scripts of the queue and the ledger, assembled from the files in broker/lua.

A file begins with `#!lua` and its flags: `allow-oom` where the script takes away or adds a bounded amount, so that a
full Redis can still empty itself. `--- @include "clock"` stands for broker/lua/include/clock.lua, once in a script. The
names of whole numbers in broker/terms.py, such as HOLD_MS, are replaced by the numbers.

Every script that includes "keys" gets the prefix of the cell's keys as ARGV[1]; KEYS[1] is one of these keys, so that
the script runs on their shard. Redis has the scripts as functions of one library (broker/lua_library.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from redis.asyncio import Redis

from broker import terms
from broker.functions import Function
from broker.lua_library import Library, make_library

_INCLUDE = re.compile(r'^--- @include "(\w+)"\n', re.MULTILINE)
_LOCAL = re.compile(
    r"^local (?:function (?P<function>\w+)(?:[^\n]* end\n|.*?^end\n)|(?P<key>[A-Z_]+) = OF_CELL[^\n]*\n)",
    re.MULTILINE | re.DOTALL,
)
_WORD = re.compile(r"\w+")
_CONSTANT = re.compile(r"\b[A-Z][A-Z_]+\b")
_CONSTANTS = {name: value for name, value in vars(terms).items() if isinstance(value, int) and name.isupper()}


class Scripts:
    """Assembles scripts. Tests replace `includes`, by name, and `constants`: a clock of their own, longer times."""

    def __init__(self, includes: Mapping[str, str] | None = None, constants: Mapping[str, int] | None = None) -> None:
        self._includes = includes or {}
        self._constants = {**_CONSTANTS, **(constants or {})}
        self._library: Library | None = None

    def register(self, redis: Redis, name: str, *, when_full: bool = False) -> Function:
        """Return the function of the script broker/lua/`name`.lua; with `when_full` for a Redis without memory."""
        return Function(redis, self.library, name + "_when_full" if when_full else name)

    @property
    def library(self) -> Library:
        """Return all scripts as functions."""
        if self._library is None:
            self._library = make_library({name: self.assemble(name) for name in script_names()})
        return self._library

    def assemble(self, name: str) -> str:
        """Return a script's whole text."""
        text = _without_unused(self._expand(_read(f"{name}.lua"), set()))
        return _CONSTANT.sub(lambda constant: str(self._constants.get(constant[0], constant[0])), text)

    def _expand(self, text: str, included: set[str]) -> str:
        def expand(include: re.Match[str]) -> str:
            name = include[1]
            if name in included:
                return ""
            included.add(name)
            return self._expand(self._includes.get(name) or _read(f"include/{name}.lua"), included)

        return _INCLUDE.sub(expand, text)


def script_names() -> list[str]:
    """Return the names of all scripts."""
    found = (path.name for path in files("broker").joinpath("lua").iterdir())
    return sorted(name.removesuffix(".lua") for name in found if name.endswith(".lua"))


def _without_unused(text: str) -> str:
    """Leave out functions and keys that are not used: a call names the keys anew, and a function has few upvalues."""
    while True:
        uses = Counter(_WORD.findall(text))
        unused = [found for found in _LOCAL.finditer(text) if uses[found["function"] or found["key"]] == 1]
        if not unused:
            return text
        for found in reversed(unused):
            text = text[: found.start()] + text[found.end() :]


@cache
def _read(path: str) -> str:
    return files("broker").joinpath("lua", path).read_text(encoding="utf-8")


SCRIPTS = Scripts()
