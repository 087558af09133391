r"""Rules for arguments that are no JSON object: values between texts, or literals as Python writes them.

text      "<parameter=city>\n" value "\n</parameter>\n"     a string as it is, other values as JSON
literal   "city=" value ", days=" value                  strings in quotes, other values as JSON
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from loraplex.contracts.artifacts.chat_formats import MARK, CallFormat
from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.build import escaped, in_slashes
from loraplex.router.generation.chat_format import ANY_TEXT, CallSyntax
from loraplex.tool_calls.values import kinds_of

# Keywords of an object's schema that these rules enforce, and those that need no enforcement.
_ENFORCED = frozenset(("type", "properties", "required", "$defs", "definitions", "x-guidance", "additionalProperties"))
_NO_EFFECT = frozenset(("$schema", "$id", "$anchor"))
_SHARED = ("$defs", "definitions", "x-guidance")
# Keywords of a string's schema that its rule enforces.
_OF_STRINGS = _NO_EFFECT | {"type", "minLength", "maxLength", "pattern", "enum", "const"}
# Keywords of a schema that says no more than a value's types.
_NULLABLE = _NO_EFFECT | {"type", "anyOf", "oneOf"}
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

    def rules(self) -> str:
        """Return the rules. Raises GrammarError."""
        for keyword in self._schema.keys() - _ENFORCED - _NO_EFFECT:
            self._leave_out(keyword)
        properties = self._schema.get("properties", {})
        required = self._schema.get("required", ())
        if not properties and self._schema.get("additionalProperties", True) is not False:
            return self._any_arguments()
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

    def _any_arguments(self) -> str:
        """Return the rules of arguments with any keys and values."""
        before, between, _, comma = (self._syntax.mark(text) for text in self._form.argument)
        item = f"{before} {_ANY_KEY} {between} {self._name}_value"
        more = f"({item} ({comma} {item})*)?" if comma else f"({item})*"
        self._value({}, f"{self._name}_value", "")
        return "\n".join((f"{self._name}: {more}", *self._lines, ""))

    def _item(self, index: int, key: str, part: Any) -> str:
        """Add the rules of one argument; return the name of the first."""
        before, between, _, _ = self._form.argument
        rule = f"{self._name}_{index}"
        self._lines.append(f"{rule}: {self._syntax.mark(before + key + between)} {rule}_value")
        self._value(part, f"{rule}_value", f".properties.{key}")
        return rule

    def _value(self, part: Any, rule: str, at: str) -> None:
        """Add the rules of a value, with the text behind it."""
        kinds = frozenset(kinds_of(part, self._schema)) if isinstance(part, dict) else frozenset[str]()
        if self._form.arguments == "text":
            behind = self._form.argument[2]
            if kinds and "string" not in kinds:
                self._lines.append(f"{rule}: {rule}_json {self._syntax.mark(behind)}")
                self._add_json(f"{rule}_json", part, at)
            else:
                self._add_text(rule, behind, part if kinds == {"string"} else {}, at)
        elif self._form.quote:
            self._add_quoted(rule, part, kinds, at)
        else:
            words = [word for kind, word in (("boolean", '"True" | "False"'), ("null", '"None"')) if kind in kinds]
            single = [r"/'([^'\\\n]|\\.)*'/"] if part == {"type": "string"} else []
            self._lines.append(f"{rule}: {' | '.join((f'{rule}_json', *words, *single))}")
            self._add_json(f"{rule}_json", part, at)

    def _add_json(self, rule: str, part: Any, at: str) -> None:
        shared = {name: self._schema[name] for name in _SHARED if name in self._schema}
        whole = {**shared, **part} if isinstance(part, dict) else shared
        if any(not one.startswith(("#/$defs/", "#/definitions/")) for one in _references(part)):
            self._leave_out("$ref", at)
            whole = shared
        self._lines.append(f"{rule}: %json {json.dumps(whole)}")

    def _add_text(self, rule: str, behind: str, part: Mapping[str, Any], at: str) -> None:
        """Add the rule of a string without quotes, as far as the text behind it, whose mark is not in it."""
        # A token is no part of a terminal.
        found = MARK.search(behind)
        at_token = found.start() if found and found[0] in self._syntax.token_ids else len(behind)
        inner, mark = json.dumps(behind[:at_token]), self._syntax.mark(behind[at_token:])
        values = [part["const"]] if "const" in part else part.get("enum")
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

    def _add_quoted(self, rule: str, part: Any, kinds: frozenset[str], at: str) -> None:
        """Add the rules of a literal whose strings stand between marks."""
        quote = self._form.quote
        if kinds == {"string"}:
            self._lines.append(f"{rule}: {self._syntax.mark(quote)} {rule}_text")
            self._add_text(f"{rule}_text", quote, part, at)
        elif kinds and not kinds & {"string", "object", "array"}:
            self._add_json(rule, part, at)
        elif kinds and not kinds & {"object", "array"} and not part.keys() - _NULLABLE:
            self._lines.append(f"{rule}: {rule}_string | {rule}_json")
            self._add_json(f"{rule}_json", {"type": sorted(kinds - {"string"})}, at)
            self._add_quoted(f"{rule}_string", {}, frozenset({"string"}), at)
        else:
            if at:
                self._leave_out("type", at)
            string, scalar = f"{rule}_string", '{"type": ["number", "boolean", "null"]}'
            self._lines.append(f"{rule}: {string} | %json {scalar} | {rule}_list | {rule}_object")
            self._lines.append(f'{rule}_list: "[" ({rule} ("," {rule})*)? "]"')
            self._lines.append(f'{rule}_object: "{{" ({_ANY_KEY} ":" {rule} ("," {_ANY_KEY} ":" {rule})*)? "}}"')
            self._lines.append(f"{string}: {self._syntax.mark(quote)} {string}_text")
            self._add_text(f"{string}_text", quote, {}, "")

    def _leave_out(self, keyword: str, at: str = "") -> None:
        """Note a part that is not enforced. Raises GrammarError where all must be."""
        place = f"{self._path}{at}.{keyword}"
        if self._left_out is None:
            raise GrammarError(place, "is not enforced where the model's format writes no JSON object")
        self._left_out.append(place)


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
