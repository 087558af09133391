"""Values of arguments as JSON, where a model writes them as texts or as literals; and their types by a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# Strings, of which the last may be cut, in an escape too, and words with the colon that makes one a key; in a literal.
_STRINGS = r"""{}"(?P<double>(?:\\.|[^"\\])*)(?:"|\\?$)|'(?P<single>(?:\\.|[^'\\])*)(?:'|\\?$)|"""
_LITERALS = _STRINGS + r"""(?P<word>[^\s{{}}\[\],:"']+)(?P<key>\s*:)?"""
# What Python calls otherwise than JSON.
_WORDS = {"True": "true", "False": "false", "None": "null"}
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def json_of(literal: str, quote: str = "") -> str:
    """Return a literal as JSON; other text as a string."""

    def in_json(found: re.Match[str]) -> str:
        parts = found.groupdict()
        if (raw := parts.get("raw")) is not None:
            return json.dumps(raw, ensure_ascii=False)
        if (single := parts["single"]) is not None:
            return '"{}"'.format(re.sub(r"\\'|\"", lambda one: "'" if one[0] == r"\'" else r"\"", single))
        if parts["word"] is None:
            return found[0]
        word = _WORDS.get(parts["word"], parts["word"])
        is_json = not parts["key"] and (word in _WORDS.values() or _NUMBER.fullmatch(word))
        return (word if is_json else json.dumps(word, ensure_ascii=False)) + (parts["key"] or "")

    mark = re.escape(quote)
    pattern = _LITERALS.format(f"{mark}(?P<raw>.*?){mark}|" if quote else "")
    return _loaded(re.sub(pattern, in_json, literal, flags=re.DOTALL)) or json.dumps(literal, ensure_ascii=False)


_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")


def typed(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: JSON of one of the types, else a string where one may be, or else a literal."""
    found = _loaded(text)
    kind = JSON_TYPES.get(type(json.loads(found)), "null") if found else ""
    if found and (not types or kind in types or (kind == "integer" and "number" in types) or "string" not in types):
        return found
    return json.dumps(text, ensure_ascii=False) if not types or "string" in types else json_of(text)


def _loaded(text: str) -> str:
    """Return a JSON text as this house writes it; empty: it is none."""
    try:
        found = json.dumps(json.loads(text, strict=False), ensure_ascii=False, allow_nan=False)
        return found if is_unicode(found) else json.dumps(json.loads(text, strict=False))
    except (ValueError, RecursionError):
        return ""


def is_unicode(text: str) -> bool:
    """Tell whether a text can be sent: JSON's escapes may make halves of characters, which cannot."""
    return not _HALVES.search(text)


_HALVES = re.compile("[\ud800-\udfff]")


def types_of(parameters: str) -> Mapping[str, frozenset[str]]:
    """Return the types of a tool's arguments by their names, as its schema says them."""
    try:
        schema = json.loads(parameters or "{}")
    except (ValueError, RecursionError):
        return {}
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    seen: Seen = {}
    return {name: kinds_of(part, schema, seen) for name, part in properties.items()}


# Maximum number of references and alternatives that lead to a type.
_DEEPEST = 8
# The types that references lead to, by their texts and depths.
Seen = dict[tuple[str, int], frozenset[str]]


def kinds_of(part: Any, root: Mapping[str, Any], seen: Seen, depth: int = 0) -> frozenset[str]:
    """Return the types that a part of a schema allows; none where it may be anything, or where they are not seen.

    A reference is followed once at a depth: there may be more ways to it than can be followed.
    """
    if not isinstance(part, dict) or depth > _DEEPEST:
        return frozenset()
    if isinstance(part.get("type"), (str, list)):
        kinds = [part["type"]] if isinstance(part["type"], str) else [*filter(_is_text, part["type"])]
        return frozenset((*(kind if kind in _KINDS else "" for kind in kinds), *_null_of(part)))
    if isinstance(reference := part.get("$ref"), str):
        if (at := (reference, depth)) not in seen:
            seen[at] = kinds_of(referred(reference, root), root, seen, depth + 1)
        return seen[at]
    if "const" in part or isinstance(part.get("enum"), list):
        values = [part["const"]] if "const" in part else part["enum"]
        return frozenset(JSON_TYPES.get(type(value), "null") for value in values)
    if isinstance(options := part.get("anyOf", part.get("oneOf")), list):
        found = [kinds_of(option, root, seen, depth + 1) for option in options]
        return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


_KINDS = frozenset((*JSON_TYPES.values(), "null"))


def _null_of(part: Mapping[str, Any]) -> tuple[str, ...]:
    return ("null",) if part.get("nullable") is True else ()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the definition that a reference names, if it is one of the schema's own."""
    _, _, path = reference.partition("#/")
    kind, _, name = path.partition("/")
    definitions = root.get(kind) if kind in ("$defs", "definitions") else None
    return definitions.get(name) if isinstance(definitions, dict) else None
