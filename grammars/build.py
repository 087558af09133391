"""Builds the grammar of an answer from a request's format: one Lark text for llguidance, the same for equal formats.

json_schema ─▶ checked schema ─┐
regex, choices, grammar ───────┴─▶ Lark text ─▶ the job ─▶ the engine compiles it, cached by its digest
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

from artifacts import ArtifactError
from artifacts.json_object import parse_object
from grammars import GrammarError
from grammars.json_schema import JsonStyle, check_schema
from grammars.lark import check_lark

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
    return f"{HEADER}start: /{_in_slashes(pattern)}/\n"


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
    return HEADER + check_lark(text, path) + "\n"


def grammar_digest(grammar: str, tenant: str = "") -> str:
    """Return the digest of a tenant's grammar: from what one has used nobody's time tells another anything."""
    return hashlib.sha256(f"{tenant}\0{grammar}".encode()).hexdigest()


def _check_size(path: str, text: str) -> None:
    if len(text.encode()) > FORMAT_BYTES:
        raise GrammarError(path, f"{len(text.encode())} bytes; at most {FORMAT_BYTES}")


def _in_slashes(pattern: str) -> str:
    """Escape what would end the regex in a Lark text: slashes and line ends."""
    return _ENDING.sub(lambda found: _ESCAPED.get(found[0], found[0]), pattern)
