"""Makes a library of Redis functions of the assembled scripts.

Redis runs the text of a script at every call, and the text of a library once, when it is loaded. So a script's local
functions are made once; its other statements become the function that Redis calls, and its local variables are declared
outside, because the local functions read them too:

    local left = tonumber(ARGV[2])            local KEYS, ARGV
    local function take() left = ... end      local left
    take()                               ──▶  local function take() left = ... end
                                              register_function{callback = function(keys, arguments)
                                                KEYS, ARGV = keys, arguments
                                                left = tonumber(ARGV[2])
                                                take()
                                              end}

Names have a hash of the text, so that the versions of a rolling upgrade have libraries of their own side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

PREFIX = "loraplex_"
_FUNCTION = re.compile(r"local function (\w+)")
_VARIABLES = re.compile(r"local (\w+(?:, \w+)*)(?: = )?")
_WORD = re.compile(r"\w+")
# Characters of the hash in names.
_HASH_CHARACTERS = 16
# Maximum number of outer variables that a function uses; Lua 5.1 allows 60.
_UPVALUES = 55
_ALLOW_OOM = "#!lua flags=allow-oom\n"


@dataclass(frozen=True, slots=True)
class Library:
    """A library's name and text."""

    name: str
    text: str


def make_library(scripts: Mapping[str, str]) -> Library:
    """Return a library with a function for each script, by its name, and NAME_when_full for those that need memory."""
    blocks = [_block(name, text) for name, text in scripts.items()]
    name = PREFIX + sha256("".join(blocks).encode()).hexdigest()[:_HASH_CHARACTERS]
    return Library(name, f"#!lua name={name}\nlocal LIBRARY, NAMES = '{name}_', {{}}\n" + "".join(blocks))


def _block(name: str, text: str) -> str:
    declared: list[str] = []
    body: list[str] = []
    for item in _items(text):
        variables = _VARIABLES.match(item)
        if _FUNCTION.match(item):
            declared.append(item)
        elif variables:
            value = item[variables.end() :]
            declared.append(f"local {variables[1]}")
            body.append(f"{variables[1]} = {value or 'nil'}")
        else:
            body.append(item)
    first_parts, last = _parts(body, {name for item in declared for name in _declared_names(item)})
    parts = [f"local function part_{number}()\n{part}\nend" for number, part in enumerate(first_parts)]
    returns = "if answer ~= nil then return answer end"
    calls = "".join(f"local answer = part_{number}()\n{returns}\n" for number in range(len(parts)))
    call = f"local function call(keys, arguments)\nKEYS, ARGV = keys, arguments\n{calls}{last}\nend"
    registered = [_registered(name, "'allow-oom'")]
    if not text.startswith(_ALLOW_OOM):
        registered = [_registered(name), _registered(name + "_when_full", "'allow-oom'")]
    return "\n".join(["do", "local KEYS, ARGV", *declared, *parts, call, *registered, "end", ""])


def _items(text: str) -> Iterable[str]:
    """Yield the statements at a text's top level, which begin in the first column, without lines of comments."""
    item: list[str] = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith(("--", "#!")):
            continue
        if item and not line.startswith((" ", "end", "else")):
            yield "\n".join(item)
            item = []
        item.append(line)
    if item:
        yield "\n".join(item)


def _declared_names(item: str) -> list[str]:
    function = _FUNCTION.match(item)
    return [function[1]] if function else _WORD.findall(item)[1:]


def _parts(body: Sequence[str], declared: set[str]) -> tuple[list[str], str]:
    """Divide the statements, so that no part uses more than _UPVALUES; one that returns an answer ends the script."""
    if len(declared) <= _UPVALUES:
        return [], "\n".join(body)
    parts: list[list[str]] = [[]]
    used: set[str] = set()
    for place, item in enumerate(body):
        rest = {word for later in body[place:] for word in _WORD.findall(later)} & declared
        words = declared & set(_WORD.findall(item))
        if len(used | words) > _UPVALUES and len(used | rest) > _UPVALUES:
            parts.append([])
            used = set()
        used |= words
        parts[-1].append(item)
    joined = ["\n".join(part) for part in parts]
    return joined[:-1], joined[-1]


def _registered(name: str, flags: str = "") -> str:
    return f"redis.register_function{{function_name = LIBRARY .. '{name}', callback = call, flags = {{{flags}}}}}"
