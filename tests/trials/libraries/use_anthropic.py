"""Anthropic's client for Python."""

from __future__ import annotations

from typing import Any

import anthropic

from tests.trials.libraries.scenarios import (
    KEY,
    MODEL,
    QUESTION,
    RESULT,
    SCHEMA,
    TOO_LONG,
    TOOL,
    URL,
    check_refused,
    check_stream,
    check_weather,
    run,
)
from tests.trials.libraries.weather import Weather

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


def stream() -> None:
    """Join a stream's texts to the whole answer."""
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        parts = list(events.text_stream)
        assert events.get_final_message().usage.output_tokens == whole.usage.output_tokens
    check_stream(parts, whole.content[0].text if whole.content[0].type == "text" else None)


def tools() -> None:
    """Send the model's call back, as the library has it and as dictionaries, with the result."""
    asked: Any = {
        "model": MODEL,
        "max_tokens": 100,
        "tools": [{"name": TOOL, "description": "Forecast of a city", "input_schema": SCHEMA}],
        "extra_body": {"temperature": 0},
    }
    called = client.messages.create(messages=MESSAGES, tool_choice={"type": "tool", "name": TOOL}, **asked)
    assert called.stop_reason == "tool_use"
    (call,) = (block for block in called.content if block.type == "tool_use")
    check_weather(call.input)
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]}
    answers = [
        client.messages.create(messages=[*MESSAGES, {"role": "assistant", "content": content}, result], **asked)
        for content in (called.content, called.model_dump()["content"])
    ]
    assert answers[0].content
    assert answers[0].content == answers[1].content, answers


def schema() -> None:
    """Parse an answer into a model."""
    parsed = client.messages.parse(model=MODEL, messages=MESSAGES, max_tokens=100, output_format=Weather).parsed_output
    assert parsed
    check_weather(parsed.model_dump())


def overflow() -> None:
    """Get the error for a prompt that is too long."""
    messages: Any = [{"role": "user", "content": TOO_LONG}]
    check_refused(
        lambda: client.messages.create(model=MODEL, messages=messages, max_tokens=9), anthropic.BadRequestError
    )


if __name__ == "__main__":
    run(stream, tools, schema, overflow)
