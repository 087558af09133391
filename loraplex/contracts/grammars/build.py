"""Builds the grammar of an answer from a request's format: one Lark text for llguidance, the same for equal formats.

json_schema ─▶ checked schema ─┐
regex, choices, grammar ───────┴─▶ Lark text ─▶ the job ─▶ the engine compiles it, cached by its digest

In the Lark text of a client options that are not obeyed here are refused, JSON schemas are checked, and rules whose
texts cannot come to an end, for example `list: item list`, are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.json_schema import JsonStyle, check_schema

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
# The deepest nesting of brackets that is read; llguidance refuses deeper ones.
_DEEPEST = 100
# Maximum bytes of a format as a client sends it.
FORMAT_BYTES = 64 * 1024
# Maximum bytes of a grammar that a worker takes: formats grow when they are built.
GRAMMAR_BYTES = 512 * 1024
# Maximum number of choices.
CHOICES = 1_000

# An escaped character of a regex, or one that would end it in a Lark text.
_ENDING = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_ESCAPED = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
# Without this option llguidance computes the bytes that must follow, which takes seconds for some regexes.
HEADER = '%llguidance {"no_forcing": true}\n'
# Begins the rules of a client in a Lark text: they may read an answer in many ways, and have lower limits.
CLIENT_RULES = "// a client's rules\n"


def json_grammar(schema: str, style: JsonStyle | None = None, path: str = "json_schema") -> str:
    """Return the grammar of the JSON texts that a schema describes. Raises GrammarError."""
    _check_size(path, schema)
    try:
        parsed = parse_object(schema.encode(), path)
    except ArtifactError as error:
        raise GrammarError(path, error.message) from error
    return f"{HEADER}start: %json {json.dumps(check_schema(parsed, style or JsonStyle(), path))}\n"


def regex_grammar(pattern: str, path: str = "regex") -> str:
    """Return the grammar of the texts that a regular expression matches as a whole. Raises GrammarError."""
    _check_size(path, pattern)
    if not pattern:
        raise GrammarError(path, "is empty")
    return f"{HEADER}start: /{in_slashes(pattern)}/\n"


def choices_grammar(values: Sequence[str], path: str = "choices.values") -> str:
    """Return the grammar of some texts. Raises GrammarError."""
    if not 1 <= len(values) <= CHOICES:
        raise GrammarError(path, f"{len(values)} choices; give 1 to {CHOICES}")
    if sum(map(len, values)) > FORMAT_BYTES:
        raise GrammarError(path, f"more than {FORMAT_BYTES} characters")
    for index, value in enumerate(values):
        if not value:
            raise GrammarError(f"{path}[{index}]", "is empty")
    return f"{HEADER}start: {' | '.join(json.dumps(value) for value in sorted(set(values)))}\n"


def lark_grammar(text: str, path: str = "grammar") -> str:
    """Return the grammar in a client's Lark text; JSON schemas in it are checked. Raises GrammarError."""
    _check_size(path, text)
    return HEADER + CLIENT_RULES + _check_lark(text, path) + "\n"


# Opens the nested grammar of a format behind reasoning. Clients cannot write it: %llguidance is refused in formats.
_NESTED = f"%lark {{\n{HEADER}"


def behind_reasoning(start: str, grammar: str, rule: str = "answer") -> str:
    """Return the grammar of a format with reasoning in front; `start` has the rules for it, which use `rule`."""
    return f"{HEADER}{start}{rule}: {_NESTED}{grammar.removeprefix(HEADER)}}}\n"


def format_alone(grammar: str) -> str:
    """Return a grammar without the reasoning in front of its format."""
    _, nested, rest = grammar.partition(_NESTED)
    return HEADER + rest.removesuffix("}\n") if nested else grammar


# Maximum characters of whitespace, outside of strings, of an answer whose whitespace the model chooses.
SPACES = 1_000
# Such a schema in a grammar, and a regex of all texts with so little whitespace.
_FLEXIBLE_JSON = re.compile(r'%json \{"x-guidance": \{"whitespace_pattern": .*')
_WORDS = r'([^" \t\n\r]|"([^"\\]|\\.)*")*'
_FEW_SPACES = rf"/{_WORDS}([ \t\n\r]{_WORDS}){{0,{SPACES}}}/"


def space_bound(grammar: str) -> str:
    """Return the grammar of the texts with at most SPACES characters of whitespace, behind the same reasoning.

    An answer keeps to both. It is empty where the model does not choose the whitespace.
    """
    bound, flexible = _FLEXIBLE_JSON.subn(lambda _: _FEW_SPACES, grammar)
    return bound if flexible else ""


def grammar_digest(grammar: str, tenant: str = "") -> str:
    """Return the digest of a tenant's grammar: from what one has used nobody's time tells another anything."""
    return hashlib.sha256(f"{tenant}\0{grammar}".encode()).hexdigest()


def _check_size(path: str, text: str) -> None:
    if len(text.encode()) > FORMAT_BYTES:
        raise GrammarError(path, f"{len(text.encode())} bytes; at most {FORMAT_BYTES}")


def escaped(text: str) -> str:
    """Return a text as a regular expression of a Lark text, without slashes around it."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n").replace("\\\r", r"\r")


def in_slashes(pattern: str) -> str:
    """Return a regex without what would end it in a Lark text: slashes and line ends."""
    return _ENDING.sub(lambda match: _ESCAPED.get(match[0], match[0]), pattern)


class _Token(NamedTuple):
    """A token of a Lark text; `kind` is a group of the pattern, or `json` for a JSON value."""

    kind: str
    text: str


def _check_lark(text: str, path: str) -> str:
    """Return the text with its JSON schemas checked. Raises GrammarError."""
    tokens = list(_tokens(text, path))
    code = [token for token in tokens if token.kind != "space"]
    for before, token, after in zip(code, code[1:], code[2:], strict=False):
        if before.text in "[," and token.text in _ATTRIBUTES and after.text == "=":
            raise GrammarError(path, f"the attribute {token.text} is not obeyed here; leave it out")
    _check_rules(tokens, path)
    return "".join(token.text for token in tokens)


def _tokens(text: str, path: str) -> Iterator[_Token]:
    at = number = 0
    while match := _TOKEN.match(text, at):
        at = match.end()
        kind = match.lastgroup or "other"
        yield _Token(kind, match[0])
        if match[0] == "%llguidance":
            raise GrammarError(path, "%llguidance is not obeyed here; leave it out")
        if match[0] in ("%json", "%regex"):
            number += match[0] == "%json"
            value, at = _json_value(text, at, path)
            if match[0] == "%json":
                value = check_schema(value, JsonStyle(), f"{path}.json[{number - 1}]")
            yield _Token("json", f" {json.dumps(value)}")
    if at < len(text):
        raise GrammarError(path, f"cannot be read from {text[at : at + 20]!r} on")


def _json_value(text: str, at: int, path: str) -> tuple[dict[str, object], int]:
    start = len(text) - len(text[at:].lstrip())
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
        return parse_object(text[start:end].encode(), "json"), end
    except (ValueError, RecursionError, ArtifactError) as error:
        raise GrammarError(path, f"holds no JSON object at character {start}: {error}") from error


class _UnreadableError(Exception):
    """The text uses what this module does not read, or is wrong: llguidance judges it."""


def _check_rules(tokens: Sequence[_Token], path: str) -> None:
    """Raise GrammarError for a rule that every text of its own contains again."""
    try:
        endless = _Reader(tokens).endless()
    except _UnreadableError:
        return
    if endless:
        raise GrammarError(path, f"rule {endless[0]!r} has no text that comes to an end: it requires itself")


class _Reader:
    """Reads the alternatives of rules and of groups in them, with what each requires."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._rules: dict[str, None] = {}
        # The rule or group that each alternative is of, and the rules and groups that must end before it does.
        self._alternatives: list[tuple[str, set[str]]] = []
        self._code = list(_code(tokens))
        self._at = 0
        self._depth = 0

    def endless(self) -> list[str]:
        """Return the rules without a text that ends. Raises _UnreadableError."""
        while self._at < len(self._code):
            if not self._head():
                self._skip_statement()
        uses: dict[str, list[int]] = {owner: [] for owner, _ in self._alternatives}
        ending, ended = list[str](), set[str]()
        for at, (owner, required) in enumerate(self._alternatives):
            required.intersection_update(uses)  # other names are of terminals
            for name in required:
                uses[name].append(at)
            if not required:
                ending.append(owner)
        while ending:
            if (name := ending.pop()) in ended:
                continue
            ended.add(name)
            for at in uses[name]:
                owner, required = self._alternatives[at]
                required.discard(name)
                if not required:
                    ending.append(owner)
        return [name for name in self._rules if name not in ended]

    def _head(self) -> bool:
        kind, text, first = self._code[self._at]
        if kind != "name" or not first:
            return False
        at = self._at + 1
        while at < len(self._code) and not self._code[at][2] and self._code[at][1] != ":":
            at += 1
        if at >= len(self._code) or self._code[at][1] != ":" or self._text(at + 1) == ":":
            raise _UnreadableError
        self._at = at + 1
        name = text.lstrip("!?").partition(".")[0]
        self._either(name)
        if name in self._rules or (self._at < len(self._code) and not self._code[self._at][2]):
            raise _UnreadableError
        self._rules[name] = None
        return True

    def _skip_statement(self) -> None:
        self._at += 1
        while self._at < len(self._code) and not self._code[self._at][2]:
            self._at += 1

    def _text(self, at: int) -> str:
        return self._code[at][1] if at < len(self._code) else ""

    def _ended(self) -> bool:
        """Tell whether the statement ends here; one that goes on in the next line begins there with `|`."""
        return self._at >= len(self._code) or (self._code[self._at][2] and self._text(self._at) != "|")

    def _either(self, owner: str) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _UnreadableError
        self._alternatives.append((owner, self._sequence()))
        while not self._ended() and self._text(self._at) == "|":
            self._at += 1
            self._alternatives.append((owner, self._sequence()))
        self._depth -= 1

    def _sequence(self) -> set[str]:
        """Read an alternative; return what it requires."""
        required = set[str]()
        while not self._ended() and self._text(self._at) not in ("|", ")", "]"):
            required |= self._item()
        return required

    def _item(self) -> set[str]:
        kind, text, _ = self._code[self._at]
        required = {text} if kind == "name" else set()
        self._at += 1
        if text in ("(", "["):
            group = f"{text}{self._at}"  # which is no rule's name
            self._either(group)
            if self._text(self._at) not in (")", "]"):
                raise _UnreadableError
            self._at += 1
            required = {group} if text == "(" else set()
        while not self._ended() and self._text(self._at) in ("?", "*", "+", "{", "~"):
            if self._may_be_none():
                required = set()
        return required

    def _may_be_none(self) -> bool:
        """Read a repetition; tell whether it allows none."""
        sign = self._text(self._at)
        self._at += 1
        if sign in ("?", "*", "+"):
            return sign != "+"
        least = self._text(self._at)
        end = {"{": "}"}.get(sign)
        while end and not self._ended() and self._text(self._at) != end:
            self._at += 1
        self._at += 1
        return least in ("0", ",")


def _code(tokens: Sequence[_Token]) -> Iterator[tuple[str, str, bool]]:
    """Yield the tokens that are no space, each with whether it is the first in its line; numbers as a whole."""
    first = True
    for kind, text in tokens:
        if kind == "space":
            first = first or "\n" in text
        else:
            yield kind, text, first
            first = False
