"""Finds the place of a grammar's fault: the smallest part of a JSON schema in it that fails alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from artifacts.grammars.endings import direct_parts

# A part of a schema, with its path.
Part = tuple[str, dict[str, Any]]
_SCHEMA = re.compile(r"(?:^(?:(?P<start>start)|arguments_(?P<tool>\d+)): )?%json (?=\{)", re.MULTILINE)
# Parts of a schema that any of its parts may need.
_SHARED = ("$defs", "definitions", "x-guidance")


def find_place(error_of: Callable[[str], str], grammar: str, message: str) -> tuple[str, str]:
    """Return the path and the error of the smallest part at fault; an empty path where no schema of a grammar is.

    `message` is the grammar's error; `error_of` returns that of a Lark text without header, empty for none.
    """
    for path, schema in _schemas(grammar):
        error, found = _Search(error_of, schema, message).smallest((path, schema))
        if error:
            return found, error
    return "", message


def _schemas(grammar: str) -> Iterator[Part]:
    """Yield the schemas of a grammar, each with its path behind the field that the grammar was made of."""
    of_tools = "\nfunction: function_" in grammar
    for number, found in enumerate(_SCHEMA.finditer(grammar)):
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except ValueError:  # a text of the grammar that looks like one
            continue
        if of_tools and found["tool"]:
            yield f"[{found['tool']}].parameters", schema
        else:
            whole = found["start"] and end == len(grammar) - 1
            yield "" if whole else f".json[{number}]", schema


class _Search:
    """A search in one schema, which halves the parts of a part: a schema of hundreds of parts takes a dozen proofs."""

    def __init__(self, error_of: Callable[[str], str], schema: dict[str, Any], message: str) -> None:
        self._error_of = error_of
        self._shared = {name: schema[name] for name in _SHARED if name in schema}
        # An optional part that cannot be met is no fault of its schema, unless a required one is the fault.
        self._unsatisfiable = "Unsatisfiable" in message

    def smallest(self, part: Part) -> tuple[str, str]:
        """Return the error and the path of the smallest part at fault in a part; an empty error: there is none."""
        if not (error := self._error(part[1])):
            return "", ""
        while inner := [(part[0] + at, one) for at, one in direct_parts(part[1]) if _stands_alone(one)]:
            if not self._any_fails(inner):
                break
            while len(inner) > 1:
                half = inner[: len(inner) // 2]
                inner = half if self._any_fails(half) else inner[len(half) :]
            if not (alone := self._error(inner[0][1])):
                break
            part, error = inner[0], alone
        return error, part[0]

    def _any_fails(self, parts: Sequence[Part]) -> bool:
        items = [part for _, part in parts]
        required = {"minItems": len(items)} if self._unsatisfiable else {}
        return bool(self._error({"type": "array", "prefixItems": items, **required}))

    def _error(self, schema: dict[str, Any]) -> str:
        error = self._error_of(f"start: %json {json.dumps({**self._shared, **schema})}\n")
        return "" if "Unsatisfiable" in error and not self._unsatisfiable else error


def _stands_alone(part: Any) -> bool:
    """Tell whether a part of a schema needs nothing but what all parts share."""
    if not isinstance(part, dict):
        return False
    references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(part))
    return all(reference.startswith(("#/$defs/", "#/definitions/")) for reference in references)
