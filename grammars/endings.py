"""Finds the parts of a JSON schema whose values cannot come to an end, for example an object that requires itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any
from urllib.parse import unquote

from grammars import GrammarError


def check_endings(root: Mapping[str, Any], path: str) -> None:
    """Raise GrammarError for a part that every value of its own contains again.

    Parts that nothing satisfies for another reason count as finite: llguidance finds and names these.
    """
    parts = list(_parts(root, path))
    dependents: dict[int, list[Mapping[str, Any]]] = {}
    for _, part in parts:
        for inner in _inner(part, root):
            dependents.setdefault(id(inner), []).append(part)
    finite: set[int] = set()
    # The last first, because a part comes before those in it.
    waiting = [part for _, part in parts]
    while waiting:
        part = waiting.pop()
        if id(part) not in finite and _ends(part, root, finite):
            finite.add(id(part))
            waiting += dependents.get(id(part), ())
    endless = [at for at, part in parts if id(part) not in finite]
    if endless:
        raise GrammarError(endless[0], "has no value that comes to an end: it requires itself")


def _inner(part: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the parts that the ending of a part may depend on."""
    for _, inner in direct_parts(part):
        yield inner
    if "$ref" in part:
        yield _follow(root, part["$ref"])


def _parts(part: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a schema and the schemas in it, each with its path."""
    if isinstance(part, dict):
        yield path, part
        for at, inner in direct_parts(part):
            yield from _parts(inner, path + at)


def direct_parts(part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that are directly in a schema, each with the end of its path."""
    for keyword, value in part.items():
        if keyword in ("properties", "patternProperties", "$defs", "definitions"):
            yield from ((f".{keyword}.{name}", inner) for name, inner in value.items())
        elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems") or (keyword == "items" and isinstance(value, list)):
            yield from ((f".{keyword}[{index}]", inner) for index, inner in enumerate(value))
        elif keyword in ("items", "additionalProperties", "additionalItems"):
            yield f".{keyword}", value


def _ends(part: Mapping[str, Any], root: Mapping[str, Any], finite: Set[int]) -> bool:
    """Tell whether a value of the part ends, of what is known to end so far."""

    def ends(inner: Any) -> bool:
        return isinstance(inner, bool) or id(inner) in finite

    if "enum" in part or "const" in part:
        return True
    if "$ref" in part and not ends(_follow(root, part["$ref"])):
        return False
    if not all(ends(inner) for inner in part.get("allOf", ())):
        return False
    if any(options and not any(map(ends, options)) for options in (part.get("anyOf"), part.get("oneOf"))):
        return False
    kinds = part.get("type", "string")
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if kinds - {"object", "array"}:
        return True
    return ("object" in kinds and _object_ends(part, ends)) or ("array" in kinds and _array_ends(part, ends))


def _object_ends(part: Mapping[str, Any], ends: Callable[[Any], bool]) -> bool:
    properties, others = part.get("properties", {}), part.get("additionalProperties", True)
    patterns = part.get("patternProperties", {})
    return all(ends(properties.get(name, True if patterns else others)) for name in part.get("required", ()))


def _array_ends(part: Mapping[str, Any], ends: Callable[[Any], bool]) -> bool:
    least, items = part.get("minItems", 0), part.get("items", True)
    first = part.get("prefixItems", ())
    if isinstance(items, list):
        first, items = items, part.get("additionalItems", True)
    return all(map(ends, first[: int(least)])) and (least <= len(first) or ends(items))


def _follow(root: Mapping[str, Any], reference: str) -> Any:
    """Return the part that a pointer leads to; True for other references, which are not followed here."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    value: Any = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return True
    return value
