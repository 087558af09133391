"""Checks a JSON schema: each keyword in it is enforced, or refused by its path; none is ignored.

Where the caller asks for it, what cannot be enforced is left out instead, so that answers keep to the rest.

The result is a schema for llguidance, whose order of keys decides the order of the properties in an answer. Patterns,
which are regular expressions of ECMA-262, become those of Rust.

Formats become patterns too, because llguidance's own accept some texts that are none (February 30). Each accepts only
texts of its format, and all that are in common use. Left out are: the year 0000, leap seconds that are not 23:59:60
UTC, quoted local parts of addresses, hostnames that may be encoded Unicode, IPv6 addresses that end as IPv4, URIs with
an IP address in brackets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from loraplex.contracts.grammars import GrammarError

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
    # OpenAPI's.
    | {"example", "externalDocs", "xml", "discriminator"}
)
# Parts of a pattern, among them look-around and back references, for which no finite automaton exists.
_LOOKS = re.compile(r"\\[1-9]|\(\?<?[=!]|\(\?P=|\\k<|\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_START = "schema:"
# Rust's whitespace has the character U+0085, and lacks the zero-width one.
_SPACE = r"[[\s&&[^\x85]]\x{FEFF}]"
_NO_SPACE = r"[^[\s&&[^\x85]]\x{FEFF}]"
_NO_LINE_END = r"[^\n\r\x{2028}\x{2029}]"
# Signs that are letters of a class in ECMA-262, and begin a class or an operation on classes in Rust.
_SIGNS_IN_CLASS = "[&~"
_STEP = re.compile(r"\\(?:u\{[0-9A-Fa-f]+\}|.)|.", re.DOTALL)
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_FRACTION = r"(?:\.[0-9]{1,9})?"
_TIME = (
    f"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    f"|23:59:60{_FRACTION}(?:[Zz]|[+-]00:00))"
)
_N = "[0-9]{1,9}"
_CLOCK = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION = f"P(?:{_N}W|{_CLOCK}|(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)(?:{_CLOCK})?)"
_ALNUM, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
# A label of at most 63 characters, without hyphens at both its third and fourth place.
_LABEL = (
    f"{_ALNUM}(?:{_ALNUM}|{_INNER}{_ALNUM}|{_INNER}{{2}}{_ALNUM}"
    f"|{_INNER}(?:{_ALNUM}{_INNER}|-{_ALNUM}){_INNER}{{0,58}}{_ALNUM})?"
)
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,64}"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@{_HOSTNAME}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = "[0-9A-Fa-f]{1,4}"
_IPV6 = (
    f"(?:(?:{_H}:){{7}}{_H}|(?:{_H}:){{1,7}}:|"
    + "|".join(f"(?:{_H}:){{1,{7 - after}}}(?::{_H}){{1,{after}}}" for after in range(1, 7))
    + f"|:(?:(?::{_H}){{1,7}}|:))"
)
_HEX = "[0-9A-Fa-f]"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
_ESCAPED = f"%{_HEX}{{2}}"
_SEGMENT = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|{_ESCAPED})"
_USER = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:]|{_ESCAPED})*"
_NAME = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=]|{_ESCAPED})*"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+\-.]*:(?:\/\/(?:{_USER}@)?{_NAME}(?::[0-9]{{0,5}})?(?:\/{_SEGMENT}*)*"
    rf"|\/(?:{_SEGMENT}+(?:\/{_SEGMENT}*)*)?|{_SEGMENT}+(?:\/{_SEGMENT}*)*)?"
    rf"(?:\?(?:{_SEGMENT}|[\/?])*)?(?:#(?:{_SEGMENT}|[\/?])*)?"
)


class Whitespace(Enum):
    """The whitespace outside of strings, as llguidance's options."""

    # Written as by json.dumps and by the tojson of chat templates.
    SPACED = MappingProxyType({"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "})
    COMPACT = MappingProxyType({"whitespace_flexible": False})
    # The model chooses.
    FLEXIBLE = MappingProxyType({"whitespace_pattern": _FLEXIBLE})


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """The way in which JSON is written: its whitespace; properties as in the schema, or sorted."""

    whitespace: Whitespace = Whitespace.SPACED
    sorted_properties: bool = False


def check_schema(
    schema: Mapping[str, Any],
    style: JsonStyle,
    path: str,
    left_out: list[str] | None = None,
    free: Collection[str] = (),
) -> dict[str, Any]:
    """Return the schema for llguidance. Raises GrammarError with the path of what is not enforced or is wrong.

    With `left_out` it adds the paths of such keywords to this list and leaves them out, as it does with the parts whose
    paths are in `free`; what it then raises is about the whole schema.
    """
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise GrammarError(path, "holds half of a surrogate pair, which is not a character") from None
    checked = _Check(style, path, left_out, free).schema(schema)
    if not isinstance(checked, dict):
        raise GrammarError(path, "is not a JSON object")
    return {"x-guidance": dict(style.whitespace.value), **checked}


class _Check:
    """A walk over one schema, whose path is `root`."""

    def __init__(self, style: JsonStyle, root: str, left_out: list[str] | None, free: Collection[str]) -> None:
        self._style = style
        self._root = root
        self._left_out, self._free = left_out, free
        self._nodes = 0
        # The checked parts by their paths, a part before those in it.
        self._parts: dict[str, dict[str, Any]] = {}
        # All parts with their paths, of which two are alike where a name has dots.
        self._all_parts: list[tuple[str, dict[str, Any]]] = []
        # The addresses that the references of the parts that the walk is in start from; and the path at which each
        # address begins: of the schema, and of parts with an id or an anchor.
        self._bases = [_START]
        self._begins = {_START: root}
        # Each part with a reference, which starts from an address and stands at a path.
        self._references: list[tuple[dict[str, Any], str, str, str]] = []

    def schema(self, value: Any) -> Any:
        """Check a whole schema."""
        checked = self._part(value, self._root)
        targets: dict[int, Mapping[str, Any]] = {}
        for part, reference, base, at in self._references:
            target = self._parts.get(self._target(reference, base))
            if target is None:
                self._leave_out(GrammarError(at, f"{reference!r} is no part of this schema"))
                del part["$ref"]
            else:
                targets[id(part)] = target
        _check_endings(self._all_parts, targets)
        return checked

    def _part(self, value: Any, path: str) -> Any:
        self._count()
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict) or (path in self._free and self._left_out is not None):
            self._leave_out(GrammarError(path, "is not a schema, which is an object, true or false"))
            return True
        checked: dict[str, Any] = {}
        self._parts[path] = checked
        self._all_parts.append((path, checked))
        self._bases.append(self._base_of(value, path))
        for keyword, argument in value.items():
            if keyword in _ANNOTATIONS or (keyword[:2] == "x-" and keyword != "x-guidance"):
                continue
            if argument is None and keyword != "const":
                continue  # serializers write what is unset
            try:
                self._keyword(checked, keyword, argument, f"{path}.{keyword}")
            except GrammarError as error:
                self._leave_out(error)
        if value.get("nullable") is True:
            _allow_null(checked)
        try:
            _check_counts(checked, path)
        except GrammarError as error:
            self._leave_out(error)
            del checked["minProperties"]
        self._bases.pop()
        return checked

    def _keyword(self, checked: dict[str, Any], keyword: str, argument: Any, at: str) -> None:
        """Put a keyword's value into the checked part, as llguidance shall have it. Raises GrammarError."""
        if keyword == "$ref":
            _require(isinstance(argument, str), at, "is not a text")
            self._references.append((checked, argument, self._bases[-1], at))
            checked[keyword] = argument
        elif keyword == "format":
            checked["allOf"] = [*checked.get("allOf", ()), _format(argument, at)]
        elif keyword == "allOf":
            checked[keyword] = [*self._argument(keyword, argument, at), *checked.get(keyword, ())]
        elif keyword == "oneOf" and self._left_out is not None and not _exclude_each_other(argument):
            self._left_out.append(at)
            checked.setdefault("anyOf", self._argument(keyword, argument, at))
        elif keyword == "nullable" or (keyword == "uniqueItems" and argument is False):
            _require(isinstance(argument, bool), at, "is not true or false")
        else:
            checked[keyword] = self._argument(keyword, argument, at)

    def _leave_out(self, error: GrammarError) -> None:
        """Note what is left out of the schema. Raises the error where all of it must be enforced."""
        if self._left_out is None or error.path == self._root:
            raise error
        self._left_out.append(error.path)

    def _base_of(self, part: Mapping[str, Any], path: str) -> str:
        """Return the address that references in a part start from; note what the part is called."""
        base = self._bases[-1]
        if isinstance(part.get("$id"), str) and (address := _joined(base, part["$id"])):
            base = address
            self._begins.setdefault(base, path)
        if isinstance(part.get("$anchor"), str):
            self._begins.setdefault(f"{base}#{part['$anchor']}", path)
        return base

    def _target(self, reference: str, base: str) -> str:
        """Return the path that a reference leads to; empty for one out of the schema."""
        fragment = reference.partition("#")[2]
        address = base if reference.startswith("#") or not reference else _joined(base, reference)
        if fragment and not fragment.startswith("/"):
            return self._begins.get(f"{address}#{fragment}", "")
        path = self._begins.get(address)
        if path is None:
            return ""
        for step in unquote(fragment).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            # A step into a list of schemas is an index.
            indexed = re.fullmatch("[0-9]+", name) and f"{path}[{name}]" in self._parts
            path = f"{path}[{name}]" if indexed else f"{path}.{name}"
        return path

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
        check = _PLAIN.get(keyword)
        if check is None:
            raise GrammarError(at, "is not enforced here; leave it out")
        check(argument, at)
        return _rust_pattern(argument) if keyword == "pattern" else argument

    def _map(self, keyword: str, argument: Any, at: str) -> dict[str, Any]:
        _require(isinstance(argument, dict), at, "is not an object of schemas")
        names = sorted(argument) if keyword == "properties" and self._style.sorted_properties else argument
        if keyword == "patternProperties":
            for pattern in argument:
                _check_pattern(pattern, f"{at}.{pattern}")
        translated = _rust_pattern if keyword == "patternProperties" else str
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


def _joined(base: str, reference: str) -> str:
    """Return the URL of a reference without its fragment; empty if it is not a URL."""
    try:
        return urldefrag(urljoin(base, reference)).url
    except ValueError:
        return ""


def _allow_null(checked: dict[str, Any]) -> None:
    """Let a part be null too, as OpenAPI's `nullable` says; one without a type or kinds stays as it is."""
    if "type" in checked:
        kinds = checked["type"] if isinstance(checked["type"], list) else [checked["type"]]
        checked["type"] = [*kinds, *(("null",) if "null" not in kinds else ())]
        if "enum" in checked and None not in checked["enum"]:
            checked["enum"] = [*checked["enum"], None]
    elif "anyOf" in checked:
        checked["anyOf"] = [*checked["anyOf"], {"type": "null"}]


def _exclude_each_other(parts: Any) -> bool:
    """Tell whether no value can be of two of these schemas, by their types or by a property that each has as const."""
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return False
    kinds = [part.get("type") for part in parts]
    if all(isinstance(kind, str) for kind in kinds):
        distinct = set(kinds)
        if len(distinct) == len(kinds) and not {"integer", "number"} <= distinct:
            return True
    tags = [dict(_tags(part)) for part in parts]
    shared = set(tags[0]).intersection(*tags) if tags else set()
    return any(len({tag[name] for tag in tags}) == len(tags) for name in shared)


def _tags(part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the required properties that have one value, a text."""
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return
    for name, schema in properties.items():
        if name in required and isinstance(schema, dict):
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            if isinstance(values, list) and len(values) == 1 and isinstance(values[0], str):
                yield name, values[0]


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
        _require(name in _TYPES, at, f"{name!r} is not one of {', '.join(_TYPES)}")
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


def _check_id(value: Any, at: str) -> None:
    _check_text(value, at)
    _require(not value or _joined(_START, value) or value.startswith("#"), at, "is not a URL")


def _check_pattern(value: Any, at: str) -> None:
    _check_text(value, at)
    for sign in _LOOKS.findall(value):
        served = sign[0] == "[" or (sign[0] == "\\" and sign[1] not in "bBk123456789")
        _require(served, at, f"{sign} is not enforced here: it looks around, or back at what a group has matched")


def _check_names(value: Any, at: str) -> None:
    _require(isinstance(value, list) and all(isinstance(name, str) for name in value), at, "is not a list of names")


_PLAIN: Mapping[str, Callable[[Any, str], None]] = {
    "type": _check_type,
    "required": _check_names,
    "pattern": _check_pattern,
    "$schema": _check_text,
    "$id": _check_id,
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


def _check_endings(parts: Sequence[tuple[str, Mapping[str, Any]]], targets: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise GrammarError for a part that every value of its own contains again, such as an object that requires itself.

    `parts` have their paths, `targets` are where the references of parts lead to, by the part's id(). Parts
    that nothing satisfies for another reason count as finite: llguidance finds and names these.
    """
    dependents: dict[int, list[Mapping[str, Any]]] = {}
    for _, part in parts:
        for _, inner in direct_parts(part):
            dependents.setdefault(id(inner), []).append(part)
        if id(part) in targets:
            dependents.setdefault(id(targets[id(part)]), []).append(part)
    finite = {id(schema) for schema in FORMATS.values()}
    # The last first, because a part comes before those in it.
    waiting = [part for _, part in parts]
    while waiting:
        part = waiting.pop()
        if id(part) not in finite and _ends(part, targets.get(id(part)), finite):
            finite.add(id(part))
            waiting += dependents.get(id(part), ())
    endless = [at for at, part in parts if id(part) not in finite]
    if endless:
        raise GrammarError(endless[0], "has no value that comes to an end: it requires itself")


def direct_parts(part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that are directly in a schema, each with the end of its path."""
    for keyword, value in part.items():
        if keyword in ("properties", "patternProperties", "$defs", "definitions"):
            yield from ((f".{keyword}.{name}", inner) for name, inner in value.items())
        elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems") or (keyword == "items" and isinstance(value, list)):
            yield from ((f".{keyword}[{index}]", inner) for index, inner in enumerate(value))
        elif keyword in ("items", "additionalProperties", "additionalItems"):
            yield f".{keyword}", value


def _ends(part: Mapping[str, Any], target: Mapping[str, Any] | None, finite: Set[int]) -> bool:
    """Tell whether a value of the part, whose reference leads to `target`, ends, of what is known to end so far."""

    def ends(inner: Any) -> bool:
        return isinstance(inner, bool) or id(inner) in finite

    if "enum" in part or "const" in part:
        return True
    if target is not None and not ends(target):
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


def _rust_pattern(pattern: str) -> str:
    """Return a pattern that means in Rust what this one means in ECMA-262."""
    translated = []
    in_class = False
    before = ""
    for step in _STEP.findall(pattern):
        now = _step(step, before, in_class=in_class)
        if not in_class and step == "[":
            in_class = True
        elif in_class and step == "]":
            in_class = False
        translated.append(now)
        before = step
    return "".join(translated)


def _step(step: str, before: str, *, in_class: bool) -> str:
    if step == r"\s":
        return _SPACE
    if step == r"\S":
        return _NO_SPACE
    if in_class:
        return f"\\{step}" if step in _SIGNS_IN_CLASS or (step == before == "-") else step
    return _NO_LINE_END if step == "." else step


def _whole(pattern: str) -> dict[str, Any]:
    return {"pattern": f"^(?:{pattern})$"}


# The schema of a format's texts, by its name.
FORMATS: Mapping[str, dict[str, Any]] = {
    "date-time": _whole(f"{_DATE}[Tt]{_TIME}"),
    "date": _whole(_DATE),
    "time": _whole(_TIME),
    "duration": _whole(_DURATION),
    "email": _whole(_EMAIL),
    "hostname": {**_whole(_HOSTNAME), "maxLength": 253},
    "ipv4": _whole(_IPV4),
    "ipv6": _whole(_IPV6),
    "uuid": _whole(_UUID),
    "uri": _whole(_URI),
}
