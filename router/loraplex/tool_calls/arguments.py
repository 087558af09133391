r"""Rules for arguments that are no JSON object: values between texts, or literals as Python writes them.

text      "<parameter=city>\n" value "\n</parameter>\n"     a string as it is, other values as JSON
literal   "city=" value ", days=" value                  strings in quotes, other values as JSON
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from loraplex.contracts.artifacts.chat_formats import MARK, CallFormat
from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.build import GRAMMAR_BYTES, escaped, in_slashes
from loraplex.router.generation.chat_format import ANY_TEXT, CallSyntax
from loraplex.tool_calls.values import JSON_TYPES, Seen, kinds_of, referred

# Keywords of an object's schema that these rules enforce, and those that need no enforcement.
_ENFORCED = frozenset(("type", "properties", "required", "$defs", "definitions", "x-guidance", "additionalProperties"))
_NO_EFFECT = frozenset(("$schema", "$id", "$anchor"))
_SHARED = ("$defs", "definitions", "x-guidance")
# Keywords of a string's schema that its rule enforces.
_OF_STRINGS = _NO_EFFECT | {"type", "minLength", "maxLength", "pattern", "enum", "const"}
# Maximum number of references and alternatives that lead to a type.
_DEEPEST = 8
_NOTHING = '""'
_ANY_KEY = "/[A-Za-z0-9_.-]{1,64}/"


def argument_rules(
    name: str, schema: Mapping[str, Any], syntax: CallSyntax, path: str, left_out: list[str] | None
) -> str:
    """Return the rules of the arguments that a checked schema describes; the first has this name.

    Adds the paths of what is not enforced to `left_out`; without it raises GrammarError.
    """
    assert syntax.calls is not None
    return _Rules(name, schema, syntax, syntax.calls, path, left_out).rules()


class _Rules:
    """The rules of one tool's arguments."""

    def __init__(
        self, name: str, schema: Mapping[str, Any], syntax: CallSyntax, form: CallFormat, path: str,
        left_out: list[str] | None,
    ) -> None:  # fmt: skip
        self._name, self._schema, self._syntax, self._form = name, schema, syntax, form
        self._path, self._left_out = path, left_out
        self._lines: list[str] = []
        self._seen: Seen = {}
        # Number of characters of the schemas in the rules: each has all definitions.
        self._schemas = 0

    def rules(self) -> str:
        """Return the rules. Raises GrammarError."""
        for keyword in self._schema.keys() - _ENFORCED - _NO_EFFECT:
            self._leave_out(keyword)
        properties = self._schema.get("properties", {})
        required = self._schema.get("required", ())
        if not properties and self._schema.get("additionalProperties", True) is not False:
            return self._any_arguments(self._schema.get("additionalProperties"))
        items = [
            (self._item(index, key, part), key in required) for index, (key, part) in enumerate(properties.items())
        ]
        if set(required) - set(properties):
            self._leave_out("required")
        self._joined(items)
        return "\n".join((*self._lines, ""))

    def _joined(self, items: list[tuple[str, bool]]) -> None:
        """Add the rules of all items in their order, of which some may be missing, with a text between two."""
        comma = self._syntax.mark(self._form.argument[3])
        if not comma:
            body = " ".join(item if needed else f"{item}?" for item, needed in items)
            self._lines.insert(0, f"{self._name}: {body or _NOTHING}")
            return
        # By the number of items that are decided: rules for where none has been written, and for where one has.
        for at, (item, needed) in enumerate(items):
            end = at + 1 == len(items)
            tail = "" if end else f" {self._name}_then_{at + 1}"
            skipped = {kind: "" if needed else f" | {self._next(kind, at + 1, end)}" for kind in ("first", "then")}
            self._lines.append(f"{self._name}_first_{at}: {item}{tail}{skipped['first']}")
            self._lines.append(f"{self._name}_then_{at}: {comma} {item}{tail}{skipped['then']}")
        self._lines.insert(0, f"{self._name}: {self._next('first', 0, not items)}")

    def _next(self, kind: str, at: int, end: bool) -> str:
        return _NOTHING if end else f"{self._name}_{kind}_{at}"

    def _any_arguments(self, values: Any) -> str:
        """Return the rules of arguments with any keys, and values of a schema."""
        before, between, _, comma = (self._syntax.mark(text) for text in self._form.argument)
        item = f"{before} {_ANY_KEY} {between} {self._name}_value"
        more = f"({item} ({comma} {item})*)?" if comma else f"({item})*"
        self._value(values, f"{self._name}_value", ".additionalProperties")
        return "\n".join((f"{self._name}: {more}", *self._lines, ""))

    def _item(self, index: int, key: str, part: Any) -> str:
        """Add the rules of one argument; return the name of the first."""
        before, between, _, _ = self._form.argument
        rule = f"{self._name}_{index}"
        self._lines.append(f"{rule}: {self._syntax.mark(before + key + between)} {rule}_value")
        self._value(part, f"{rule}_value", f".properties.{key}")
        return rule

    def _value(self, part: Any, rule: str, at: str) -> None:
        """Add the rules of a value, with the text behind it: one for each of its types."""
        part = part if isinstance(part, dict) else {}
        if self._form.arguments == "literal" and not self._form.quote:
            self._add_literal(rule, part, at)
            return
        options = list(self._options(part, set()))
        self._lines.append(f"{rule}: {' | '.join(f'{rule}_{number}' for number in range(len(options)))}")
        for number, option in enumerate(options):
            self._add_option(f"{rule}_{number}", option, at)

    def _options(self, part: Mapping[str, Any], followed: set[str], depth: int = 0) -> Iterator[Mapping[str, Any]]:
        """Yield schemas of one type each, of which a value satisfies one; those behind a reference once."""
        options = part.get("anyOf", part.get("oneOf"))
        kinds = part.get("type")
        if depth < _DEEPEST and isinstance(target := referred(part.get("$ref", ""), self._schema), dict):
            if part["$ref"] not in followed:
                followed.add(part["$ref"])
                yield from self._options(target, followed, depth + 1)
        elif depth < _DEEPEST and options and not part.keys() - _NO_EFFECT - {"anyOf", "oneOf"}:
            for option in options:
                yield from self._options(option if isinstance(option, dict) else {}, followed, depth + 1)
        elif isinstance(kinds, list) or "enum" in part or "const" in part:
            listed = [kinds] if isinstance(kinds, str) else kinds or [*JSON_TYPES.values(), "null"]
            for name in listed:
                if values := _of_type(part, name):
                    yield {**part, "type": name, **values}
        else:
            yield part

    def _add_option(self, rule: str, part: Mapping[str, Any], at: str) -> None:
        """Add the rules of a value of one type, or of any where the schema has none, between texts or quotes."""
        kind, quote = part.get("type", "string"), self._form.quote
        if kind != "string" and not (quote and kind in ("object", "array")):
            self._lines.append(f"{rule}: {rule}_json {'' if quote else self._syntax.mark(self._form.argument[2])}")
            self._add_json(f"{rule}_json", part, at)
        elif not quote:
            self._add_text(rule, self._form.argument[2], part, at)
        elif part.get("type") == "string":
            self._lines.append(f"{rule}: {self._syntax.mark(quote)} {rule}_text")
            self._add_text(f"{rule}_text", quote, part, at)
        else:
            if part:
                self._leave_out("type", at)
            anything, scalar = f"{rule}_any", '{"type": ["number", "boolean", "null"]}'
            inner = {"array": f"{rule}_list", "object": f"{rule}_object"}.get(part.get("type", ""), anything)
            self._lines.append(
                f"{rule}: {inner}\n{anything}: {rule}_string | %json {scalar} | {rule}_list | {rule}_object"
            )
            self._lines.append(f'{rule}_list: "[" ({anything} ("," {anything})*)? "]"')
            pair = f'{_ANY_KEY} ":" {anything}'
            self._lines.append(f'{rule}_object: "{{" ({pair} ("," {pair})*)? "}}"')
            self._add_option(f"{rule}_string", {"type": "string"}, "")

    def _add_literal(self, rule: str, part: Mapping[str, Any], at: str) -> None:
        """Add the rules of a literal: JSON, with Python's words and quotes where a value may be of such a type."""
        kinds = kinds_of(part, self._schema, self._seen)
        words = [word for kind, word in (("boolean", '"True" | "False"'), ("null", '"None"')) if kind in kinds]
        single = [r"/'([^'\\\n]|\\.)*'/"] if part == {"type": "string"} else []
        plain = not {"enum", "const"} & part.keys()
        self._lines.append(f"{rule}: {' | '.join((f'{rule}_json', *(words if plain else ()), *single))}")
        self._add_json(f"{rule}_json", part, at)

    def _add_json(self, rule: str, part: Any, at: str) -> None:
        shared = {name: self._schema[name] for name in _SHARED if name in self._schema}
        whole = {**shared, **part} if isinstance(part, dict) else shared
        if any(not one.startswith(("#/$defs/", "#/definitions/")) for one in _references(part)):
            self._leave_out("$ref", at)
            whole = shared
        self._lines.append(f"{rule}: %json {json.dumps(whole)}")
        self._schemas += len(self._lines[-1])
        if self._schemas > GRAMMAR_BYTES:
            raise GrammarError(self._path, f"makes a grammar of more than {GRAMMAR_BYTES} bytes")

    def _add_text(self, rule: str, behind: str, part: Mapping[str, Any], at: str) -> None:
        """Add the rule of a string without quotes, as far as the text behind it, whose mark is not in it."""
        # A token is no part of a terminal.
        found = MARK.search(behind)
        at_token = found.start() if found and found[0] in self._syntax.token_ids else len(behind)
        inner, mark = json.dumps(behind[:at_token]), self._syntax.mark(behind[at_token:])
        values = part.get("enum")
        if values is not None:
            words = [value for value in values if isinstance(value, str) and behind.strip() not in value]
            self._lines.append(f"{rule}: ({' | '.join(map(json.dumps, words))}) {inner} {mark}")
            return
        text = ANY_TEXT
        for one in (part, *part.get("allOf", ())):
            least, most = one.get("minLength", 0), one.get("maxLength")
            if least or most is not None:
                text += rf" & /(.|\n){{{int(least)},{int(most) if most is not None else ''}}}/"
            if pattern := _anchored(one["pattern"]) if "pattern" in one else "":
                text += f" & /{in_slashes(pattern)}/"
            elif "pattern" in one:
                self._leave_out("pattern", at)
            for keyword in one.keys() - _OF_STRINGS - ({"allOf"} if one is part else set()):
                self._leave_out(keyword, at)
        text += f" & ~/(.|\\n)*{escaped(behind.strip())}(.|\\n)*/"
        terminal = rule.upper()
        self._lines.append(f"{rule}: {terminal} {mark}\n{terminal}: ({text}) {inner}")

    def _leave_out(self, keyword: str, at: str = "") -> None:
        """Note a part that is not enforced. Raises GrammarError where all must be."""
        place = f"{self._path}{at}.{keyword}"
        if self._left_out is None:
            raise GrammarError(place, "is not enforced where the model's format writes no JSON object")
        self._left_out.append(place)


def _of_type(part: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    """Return the values of a type that a schema lists, nothing more where it lists none; None: it lists no such one."""
    if "enum" not in part and "const" not in part:
        return {"type": kind}
    values = [part["const"]] if "const" in part else part["enum"]
    fitting = [value for value in values if JSON_TYPES.get(type(value), "null") in (kind, _NARROWER.get(kind))]
    return {"enum": fitting} if fitting else None


_NARROWER = {"number": "integer"}


def _references(part: Any) -> list[str]:
    return re.findall(r'"\$ref": "([^"]*)"', json.dumps(part))


def _anchored(pattern: str) -> str:
    """Return a pattern for the whole of a text; empty where it has alternatives, each with its own anchors."""
    depth = 0
    for sign in _SIGN.findall(pattern):
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and not depth:
            return ""
    ends = pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = pattern.removeprefix("^")[: -1 if ends else None]
    anything = ANY_TEXT.strip("/")
    return f"{'' if pattern.startswith('^') else anything}({inner}){'' if ends else anything}"


# Signs of a regular expression: escaped ones, and classes, as a whole.
_SIGN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
