"""The formats in which models write calls of tools and reasoning: data that one reader and one grammar interpret.

    opens  calls[0]  call  calls[1]  call  calls[2]  closes       call: call[0] NAME call[1] ARGUMENTS call[2]

chat_formats.json has those of the families, the first that a template shows counts; an adapter may bring its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from loraplex.contracts.artifacts import ArtifactError

# Texts that a tokenizer may have as tokens.
MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
# Stands in the texts before a call's name and its arguments for a number of the call.
NUMBER = "{id}"
Text = Annotated[str, msgspec.Meta(max_length=200)]
Keys = Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=8)]
Shown = Annotated[tuple[tuple[Text, ...], ...], msgspec.Meta(max_length=8)]


class _Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A format; a chat template shows it that has all texts of one of `shown_by`."""

    name: Text = ""
    shown_by: Shown = ()

    def is_shown(self, source: str) -> bool:
        """Tell whether a chat template shows the format."""
        return any(all(text in source for text in texts) for texts in self.shown_by)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts of the format that may be tokens."""
        texts = _texts({**msgspec.to_builtins(self), "name": "", "shown_by": ()})
        return tuple(dict.fromkeys(mark for text in texts for mark in MARK.findall(text)))


class CallFormat(_Format, frozen=True, kw_only=True):
    """How calls are written. Space at the ends of texts and between words is optional where calls are read.

    opens      texts that begin calls, the first as it is written; behind `^` only where no text is; `^` alone: none
    calls      texts before the first call, between two, and behind the last; `shared`: they share one opening
    call       texts before a call's name, between name and arguments, and behind them; `{id}` is a number of the call
    keys       of a call that is a JSON object: keys of the name, and of the arguments, the first as it is written
    arguments  json: an object; text: values between texts, typed by the schema; literal: values as Python writes them
    argument   texts before a key, between key and value, behind the value, and between two arguments
    quote      around strings of literals; empty: Python's quotes
    """

    opens: Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=8)]
    closes: Text = ""
    calls: tuple[Text, Text, Text] = ("", "", "")
    shared: bool = False
    call: tuple[Text, Text, Text]
    keys: tuple[Keys, Keys] | None = None
    arguments: Literal["json", "text", "literal"] = "json"
    argument: tuple[Text, Text, Text, Text] = ("", "", "", "")
    quote: Text = ""


class ReasoningFormat(_Format, frozen=True, kw_only=True):
    """The texts around reasoning, which begins an answer or stands `anywhere`; `hides`: texts that are not shown."""

    opens: Annotated[Text, msgspec.Meta(min_length=1)]
    closes: Annotated[Text, msgspec.Meta(min_length=1)]
    anywhere: bool = False
    hides: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ()


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


class _Table(msgspec.Struct, frozen=True):
    calls: dict[str, CallFormat]
    reasoning: dict[str, ReasoningFormat]


_TABLE = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=_Table)
CALLS = {name: msgspec.structs.replace(form, name=name) for name, form in _TABLE.calls.items()}
REASONING = tuple(msgspec.structs.replace(form, name=name) for name, form in _TABLE.reasoning.items())
F = TypeVar("F", bound=_Format)
# The name of a format that looks for no calls.
NO_CALLS = "none"


def parse_format(field: str, value: Any, kind: type[F]) -> F:
    """Return a format that an adapter brings. Raises ArtifactError with the field's path."""
    try:
        form = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise ArtifactError(f"{field}{path.rstrip('`')}"[:200], message) from None
    if isinstance(form, CallFormat):
        _check_calls(field, form)
    return form


def _check_calls(field: str, form: CallFormat) -> None:
    """Raise ArtifactError if a text that delimits calls is missing."""
    before, between, behind, _ = map(str.strip, form.argument)
    end = form.call[2].strip()
    for holds, part, message in (
        ("" not in form.opens, "opens", "has an empty text; calls without a mark in front are '^'"),
        (form.arguments == "json" or between, "argument[1]", "is empty; it stands between a key and its value"),
        (form.arguments != "text" or before, "argument[0]", "is empty; it stands before a key"),
        (form.arguments != "text" or behind, "argument[2]", "is empty; it stands behind a value"),
        (form.arguments != "text" or end or form.closes, "call[2]", "is empty; it ends a call's arguments"),
        (form.arguments != "literal" or end, "call[2]", "is empty; it ends a call's arguments"),
        (form.keys is None or "{" in form.call[0], "call[0]", "has no '{', with which a call that has keys begins"),
        (
            form.opens[0] != "^" or (form.calls[0] + form.call[0]).strip(),
            "calls[0]",
            "is empty, as opens is",
        ),
    ):
        if not holds:
            raise ArtifactError(f"{field}.{part}", message)
