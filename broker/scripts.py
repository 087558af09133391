"""The Lua scripts of the queue, assembled from the files in broker/lua.

A file begins with `#!lua` and its flags: `allow-oom` where the script takes away or adds a bounded amount, so that a
full Redis can still empty itself. `--- @include "clock"` stands for broker/lua/include/clock.lua, once in a script. The
names of broker/terms.py's whole numbers, such as HOLD_MS, are replaced by the numbers.

Every script that includes "keys" gets the prefix of the cell's keys as ARGV[1]; KEYS[1] is one of these keys, so that
the script runs on their shard.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from broker import terms

_INCLUDE = re.compile(r'^--- @include "(\w+)"\n', re.MULTILINE)
_LOCAL = re.compile(
    r"^local (?:function (?P<function>\w+)(?:[^\n]* end\n|.*?^end\n)|(?P<key>[A-Z_]+) = PREFIX[^\n]*\n)",
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
        # Whole texts by name: each queue of a process registers the same scripts.
        self._assembled: dict[str, str] = {}

    def register(self, redis: Redis, name: str, *, allow_oom: bool = False) -> AsyncScript:
        """Return the script broker/lua/`name`.lua, ready to be called; with `allow_oom` also for a full Redis."""
        text = self.assemble(name)
        return redis.register_script(re.sub(r"\A#!lua\n", "#!lua flags=allow-oom\n", text) if allow_oom else text)

    def assemble(self, name: str) -> str:
        """Return a script's whole text."""
        if name not in self._assembled:
            text = _without_unused(self._expand(_read(f"{name}.lua"), set()))
            replaced = _CONSTANT.sub(lambda constant: str(self._constants.get(constant[0], constant[0])), text)
            self._assembled[name] = replaced
        return self._assembled[name]

    def _expand(self, text: str, included: set[str]) -> str:
        def expand(include: re.Match[str]) -> str:
            name = include[1]
            if name in included:
                return ""
            included.add(name)
            return self._expand(self._includes.get(name) or _read(f"include/{name}.lua"), included)

        return _INCLUDE.sub(expand, text)


def _without_unused(text: str) -> str:
    """Leave out functions and keys that are not used: each call of a script makes all of them, 0.4 us each."""
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
