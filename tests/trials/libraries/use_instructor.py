"""Instructor, on OpenAI's client."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from instructor.core import InstructorRetryException

from tests.trials.libraries.scenarios import (
    KEY,
    MODEL,
    QUESTION,
    RESULT,
    TOO_LONG,
    URL,
    check_refused,
    check_weather,
    run,
)
from tests.trials.libraries.weather import Weather

own = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
by_tools = instructor.from_openai(own, mode=instructor.Mode.TOOLS)
by_schema = instructor.from_openai(own, mode=instructor.Mode.JSON_SCHEMA)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
ASKED: Any = {"model": MODEL, "temperature": 0, "max_tokens": 100, "max_retries": 0}


def stream() -> None:
    """Receive a model as it grows, until it is whole."""
    *_, last = by_schema.create_partial(response_model=Weather, messages=MESSAGES, **ASKED)
    check_weather(last.model_dump())


def tools() -> None:
    """Send the model's call back, as OpenAI's client has it, with the result."""
    parsed, called = by_tools.create_with_completion(response_model=Weather, messages=MESSAGES, **ASKED)
    check_weather(parsed.model_dump())
    message = called.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
    messages: Any = [*MESSAGES, message.model_dump(), result]
    check_weather(by_tools.create(response_model=Weather, messages=messages, **ASKED).model_dump())


def schema() -> None:
    """Parse an answer into a model."""
    check_weather(by_schema.create(response_model=Weather, messages=MESSAGES, **ASKED).model_dump())


def overflow() -> None:
    """Get the library's error, with the gateway's, for a prompt that is too long."""
    messages: Any = [{"role": "user", "content": TOO_LONG}]
    check_refused(
        lambda: by_schema.create(response_model=Weather, messages=messages, **ASKED), InstructorRetryException
    )


if __name__ == "__main__":
    run(stream, tools, schema, overflow)
