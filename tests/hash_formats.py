"""Formats that the distributed tests draw: one of each kind, with answers that are long enough for faults to hit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from loraplex.contracts.artifacts.chat_formats import CALLS
from loraplex.contracts.grammars.build import choices_grammar, json_grammar, lark_grammar, regex_grammar
from loraplex.router.generation.chat_format import CallSyntax
from loraplex.router.request import Chat, ChatMessage, Tool
from loraplex.tool_calls import tool_grammar

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 5, "maxLength": 12},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "minItems": 5},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
_WORDS = tuple(f"{first} has {second} and never looks back at it." for first in "AB" for second in ("one", "two"))
# The value of each option of a request.
FORMATS: Mapping[str, Any] = {
    "json_schema": json.dumps(_SCHEMA),
    "regex": "[a-f]{8,40}( [0-9]{2,4})*",
    "grammar": 'start: item{4,} "."\nitem: "(" item+ ")" | WORD\nWORD: /[a-z]{2,5} /',
    "choices": _WORDS,
}
_BUILDERS: Mapping[str, Callable[[Any], str]] = {
    "json_schema": json_grammar,
    "regex": regex_grammar,
    "grammar": lark_grammar,
    "choices": choices_grammar,
}
_TOOLS = (Tool("look", "", json.dumps({"type": "object", "properties": {"at": {"type": "string", "maxLength": 9}}})),)
# Formats of calls whose marks the hash model can write: its tokens are bytes, and none is a part of a character.
ASCII_CALLS = tuple(name for name, form in CALLS.items() if msgspec.json.encode(form).isascii())


def or_calls(grammar: str, form: str) -> str:
    """Return the grammar of answers that keep to a format, or call a tool in this format of calls."""
    chat = Chat((ChatMessage("user", "x"),), _TOOLS)
    return tool_grammar(chat, CallSyntax(CALLS[form], {}), answer=grammar).text


# The grammar of each, and of no format.
GRAMMARS: Mapping[str, str] = {"": "", **{name: _BUILDERS[name](value) for name, value in FORMATS.items()}}
