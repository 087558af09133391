"""Values of arguments as JSON, where a model writes them as texts or as literals; and their types by a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Strings, of which the last may be cut, and words with the colon that makes one a key; in a literal.
_STRINGS = r"""{}"(?P<double>(?:\\.|[^"\\])*)(?:"|$)|'(?P<single>(?:\\.|[^'\\])*)(?:'|$)|"""
_LITERALS = _STRINGS + r"""(?P<word>[^\s{{}}\[\],:"']+)(?P<key>\s*:)?"""
# What Python calls otherwise than JSON.
_WORDS = {"True": "true", "False": "false", "None": "null"}
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def json_of(literal: str, quote: str = "") -> str:
    """Return a literal as JSON; one that is none as a string."""

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
        return json.dumps(json.loads(text, strict=False), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return ""


def types_of(parameters: str) -> Mapping[str, frozenset[str]]:
    """Return the types of a tool's arguments by their names, as its schema says them."""
    try:
        schema = json.loads(parameters or "{}")
    except (ValueError, RecursionError):
        return {}
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: frozenset(kinds_of(part, schema)) for name, part in properties.items()}


# Maximum number of references and alternatives that lead to a type.
_DEEPEST = 8


def kinds_of(part: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """Yield the types that a part of a schema allows; none where it may be anything, or where they are not seen."""
    if not isinstance(part, dict) or depth > _DEEPEST:
        return
    if isinstance(part.get("type"), (str, list)):
        yield from [part["type"]] if isinstance(part["type"], str) else filter(_is_text, part["type"])
        if part.get("nullable") is True:
            yield "null"
    elif isinstance(part.get("$ref"), str):
        yield from kinds_of(referred(part["$ref"], root), root, depth + 1)
    elif "const" in part or isinstance(part.get("enum"), list):
        values = [part["const"]] if "const" in part else part["enum"]
        yield from (JSON_TYPES.get(type(value), "null") for value in values)
    elif isinstance(options := part.get("anyOf", part.get("oneOf")), list):
        kinds = [list(kinds_of(option, root, depth + 1)) for option in options]
        yield from (kind for option in kinds if all(kinds) for kind in option)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the definition that a reference names, if it is one of the schema's own."""
    _, _, path = reference.partition("#/")
    kind, _, name = path.partition("/")
    definitions = root.get(kind) if kind in ("$defs", "definitions") else None
    return definitions.get(name) if isinstance(definitions, dict) else None
