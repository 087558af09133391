"""Parts that the scripts of this folder share: questions, checks, reports. Imports the standard library alone."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Refusal = TypeVar("Refusal", bound=Exception)

# The gateway's address with its scheme, and the model or adapter that answers.
URL = os.environ.get("LORAPLEX_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("LORAPLEX_MODEL", "model")
# A gateway without credentials ignores keys, but most libraries want one.
KEY = "none"

QUESTION = "What is the weather?"
# A question that is longer than any model's context in these tests.
TOO_LONG = "word " * 10_000
# Words of the gateway's error by which libraries tell it from others.
OVERFLOW_WORDS = "maximum context length"

# A function, its result, and the schema of its arguments: any model's answer is valid and short.
TOOL = "weather"
RESULT = "rain"
CITIES, DAYS = ("Oslo", "Paris"), (1, 2, 3)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": list(CITIES)},
        "days": {"type": "integer", "enum": list(DAYS)},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def check_weather(fields: Mapping[str, Any] | str) -> None:
    """Assert that arguments, or the JSON text of an answer, fit SCHEMA."""
    if isinstance(fields, str):
        fields = json.loads(fields)
    assert isinstance(fields, Mapping), fields
    assert fields.keys() == {"city", "days"}, fields
    assert fields["city"] in CITIES, fields
    assert fields["days"] in DAYS, fields


def check_stream(parts: list[str], whole: str | None) -> None:
    """Assert that the parts of a stream join to the whole answer; how many tokens a part has depends on the time."""
    assert whole
    assert "".join(parts) == whole, (parts, whole)


def check_refused(call: Callable[[], object], kind: type[Refusal]) -> Refusal:
    """Assert that a call raises this error, with the words for a prompt that is too long; return it."""
    try:
        call()
    except kind as error:
        refusal = error
    else:
        raise AssertionError("a prompt that is too long was answered")
    assert OVERFLOW_WORDS in str(refusal), refusal
    return refusal


def run(*scenarios: Callable[[], object]) -> None:
    """Run scenarios, and print a line of JSON for each: its name, whether it passed, and why not."""
    for scenario in scenarios:
        why = ""
        try:
            scenario()
        except Exception as error:
            traceback.print_exc()
            line = traceback.extract_tb(error.__traceback__)[-1].line
            why = f"{type(error).__name__}: {str(error) or line}"
        print(json.dumps({"scenario": scenario.__name__, "ok": not why, "why": why}), flush=True)
