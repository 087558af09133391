"""Checks a JSON schema: each keyword in it is enforced, or refused by its path; none is ignored.

The result is a schema for llguidance, whose order of keys decides the order of the properties in an answer. Formats
become patterns (see formats.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from artifacts.grammars.endings import check_endings
from artifacts.grammars.errors import GrammarError
from artifacts.grammars.formats import FORMATS
from artifacts.grammars.patterns import rust_pattern
from artifacts.grammars.references import References

# Maximum number of objects, lists and values in a schema.
NODES = 10_000
# Largest whole number that a float64, in which bounds are compared, has exactly.
_EXACT = 1 << 53
# Whitespace that the model may write where JSON allows it: at most 40 characters, so that it comes to an end.
_FLEXIBLE = r"[ \t\n\r]{1,40}"

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_ONE = ("additionalProperties", "additionalItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
    | {"$vocabulary", "contentMediaType", "contentEncoding"}
)


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """The way in which JSON is written: compact, or with whitespace; properties as in the schema, or sorted."""

    flexible: bool = False
    sorted_properties: bool = False


def check_schema(schema: Mapping[str, Any], style: JsonStyle, path: str) -> dict[str, Any]:
    """Return the schema for llguidance. Raises GrammarError with the path of what is not enforced or is wrong."""
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise GrammarError(path, "holds half of a surrogate pair, which is no character") from None
    checked = _Check(style, path).schema(schema, path)
    if not isinstance(checked, dict):
        raise GrammarError(path, "is not a JSON object")
    check_endings(checked, path)
    return {"x-guidance": _GUIDANCE[style.flexible], **checked}


_GUIDANCE: Mapping[bool, Mapping[str, Any]] = {
    False: {"whitespace_flexible": False},
    True: {"whitespace_pattern": _FLEXIBLE},
}


class _Check:
    """A walk over one schema."""

    def __init__(self, style: JsonStyle, root: str) -> None:
        self._style = style
        self._nodes = 0
        self._root = root
        self._references = References(root)

    def schema(self, value: Any, path: str) -> Any:
        """Check a whole schema."""
        checked = self._part(value, path)
        self._references.check()
        return checked

    def _part(self, value: Any, path: str) -> Any:
        self._count()
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise GrammarError(path, "is not a schema, which is an object, true or false")
        with self._references.inside(value, path):
            checked: dict[str, Any] = {}
            for keyword, argument in value.items():
                at = f"{path}.{keyword}"
                if keyword not in _ANNOTATIONS and keyword != "format":
                    checked[keyword] = self._argument(keyword, argument, at)
            if "format" in value:
                checked["allOf"] = [*checked.get("allOf", ()), _format(value["format"], f"{path}.format")]
            _check_counts(checked, path)
        return checked

    def _argument(self, keyword: str, argument: Any, at: str) -> Any:
        """Check the value of a keyword; return it as llguidance shall have it."""
        if keyword in _ONE or (keyword == "items" and not isinstance(argument, list)):
            return self._part(argument, at)
        if keyword in _MAPS:
            return self._map(keyword, argument, at)
        if keyword in _LISTS or keyword == "items":
            _require(isinstance(argument, list) and argument, at, "is not a list of schemas")
            return [self._part(item, f"{at}[{index}]") for index, item in enumerate(argument)]
        if keyword in ("enum", "const"):
            return self._values(keyword, argument, at)
        if keyword == "$ref":
            _require(isinstance(argument, str), at, "is not a text")
            self._references.add(argument, at)
            return argument
        check = _PLAIN.get(keyword)
        if check is None:
            raise GrammarError(at, "is not enforced here; leave it out")
        check(argument, at)
        return rust_pattern(argument) if keyword == "pattern" else argument

    def _map(self, keyword: str, argument: Any, at: str) -> dict[str, Any]:
        _require(isinstance(argument, dict), at, "is not an object of schemas")
        names = sorted(argument) if keyword == "properties" and self._style.sorted_properties else argument
        translated = rust_pattern if keyword == "patternProperties" else str
        return {translated(name): self._part(argument[name], f"{at}.{name}") for name in names}

    def _values(self, keyword: str, argument: Any, at: str) -> Any:
        if keyword == "enum":
            _require(isinstance(argument, list) and argument, at, "is not a list of values")
        waiting = [argument]
        while waiting:
            value = waiting.pop()
            self._count()
            if isinstance(value, (dict, list)):
                waiting.extend(value.values() if isinstance(value, dict) else value)
            elif isinstance(value, int) and abs(value) > _EXACT:
                raise GrammarError(at, f"{value} is beyond 2^53, so that it is not exact")
        return argument

    def _count(self) -> None:
        self._nodes += 1
        if self._nodes > NODES:
            raise GrammarError(self._root, f"has more than {NODES} parts")


def _require(holds: Any, at: str, message: str) -> None:
    if not holds:
        raise GrammarError(at, message)


def _format(name: Any, at: str) -> dict[str, Any]:
    """Return the schema of the texts of a format."""
    if not isinstance(name, str) or name not in FORMATS:
        raise GrammarError(at, f"{name!r} is not enforced here; use a pattern, or one of {', '.join(FORMATS)}")
    return FORMATS[name]


def _check_type(value: Any, at: str) -> None:
    for name in value if isinstance(value, list) else [value]:
        _require(name in _TYPES, at, f"{name!r} is none of {', '.join(_TYPES)}")
    _require(value, at, "is an empty list")


def _check_count(value: Any, at: str) -> None:
    _require(isinstance(value, (int, float)) and not isinstance(value, bool), at, "is not a whole number")
    _require(value >= 0 and value == int(value), at, f"{value} is not a whole number from 0 on")


def _check_bound(value: Any, at: str) -> None:
    # Draft 4 writes exclusive bounds as true or false beside minimum and maximum.
    if isinstance(value, bool) and ".exclusiveM" in at[-17:]:
        return
    _require(isinstance(value, (int, float)) and not isinstance(value, bool), at, "is not a number")
    _require(abs(value) <= _EXACT, at, f"{value} is beyond 2^53, so that it is not exact")


def _check_multiple(value: Any, at: str) -> None:
    _check_bound(value, at)
    _require(value > 0, at, f"{value} is not above 0")


def _check_text(value: Any, at: str) -> None:
    _require(isinstance(value, str), at, "is not a text")


def _check_names(value: Any, at: str) -> None:
    _require(isinstance(value, list) and all(isinstance(name, str) for name in value), at, "is not a list of names")


_PLAIN: Mapping[str, Callable[[Any, str], None]] = {
    "type": _check_type,
    "required": _check_names,
    "pattern": _check_text,
    "$schema": _check_text,
    "$id": _check_text,
    "$anchor": _check_text,
    **dict.fromkeys(_COUNTS, _check_count),
    **dict.fromkeys(_BOUNDS, _check_bound),
    "multipleOf": _check_multiple,
}


def _check_counts(schema: Mapping[str, Any], path: str) -> None:
    """Refuse a minimum of properties that repeated names would seem to reach: only named ones are kept apart."""
    least, named = schema.get("minProperties", 0), len(set(schema.get("required", ())))
    if least > named + 1:
        raise GrammarError(
            f"{path}.minProperties", f"{least} is enforced only up to the number of required properties and 1 more"
        )
