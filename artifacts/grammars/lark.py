"""Checks the Lark text of a client: options that are not obeyed here are refused, JSON schemas in it are checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from artifacts.errors import ArtifactError
from artifacts.grammars.errors import GrammarError
from artifacts.grammars.json_schema import JsonStyle, check_schema
from artifacts.grammars.lark_endings import check_rules
from artifacts.json_object import parse_object

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|\#[^\n]*)
  | (?P<text>"(?:\\.|[^"\\\n])*"i?)
  | (?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
  | (?P<special><[^<>\s]+>)
  | (?P<directive>%[a-z_]+)
  | (?P<name>[!?]?@?[A-Za-z_][A-Za-z0-9_\-.]*)
  | (?P<other>.)
    """,
    re.VERBOSE,
)
# Attributes of a rule that would change sampling, or take back tokens that have been sent.
_ATTRIBUTES = ("temperature", "max_tokens", "stop")


class Token(NamedTuple):
    """A token of a Lark text; `kind` is a group of the pattern, or `json` for a JSON value."""

    kind: str
    text: str


def check_lark(text: str, path: str) -> str:
    """Return the text with its JSON schemas checked. Raises GrammarError."""
    tokens = list(_tokens(text, path))
    code = [token for token in tokens if token.kind != "space"]
    for before, token, after in zip(code, code[1:], code[2:], strict=False):
        if before.text in "[," and token.text in _ATTRIBUTES and after.text == "=":
            raise GrammarError(path, f"the attribute {token.text} is not obeyed here; leave it out")
    check_rules(tokens, path)
    return "".join(token.text for token in tokens)


def _tokens(text: str, path: str) -> Iterator[Token]:
    at = number = 0
    while match := _TOKEN.match(text, at):
        at = match.end()
        kind = match.lastgroup or "other"
        yield Token(kind, match[0])
        if match[0] == "%llguidance":
            raise GrammarError(path, "%llguidance is not obeyed here; leave it out")
        if match[0] in ("%json", "%regex"):
            number += match[0] == "%json"
            value, at = _json_value(text, at, path)
            if match[0] == "%json":
                value = check_schema(value, JsonStyle(), f"{path}.json[{number - 1}]")
            yield Token("json", f" {json.dumps(value)}")
    if at < len(text):
        raise GrammarError(path, f"cannot be read from {text[at : at + 20]!r} on")


def _json_value(text: str, at: int, path: str) -> tuple[dict[str, object], int]:
    start = len(text) - len(text[at:].lstrip())
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
        return parse_object(text[start:end].encode(), "json"), end
    except (ValueError, RecursionError, ArtifactError) as error:
        raise GrammarError(path, f"holds no JSON object at character {start}: {error}") from error
