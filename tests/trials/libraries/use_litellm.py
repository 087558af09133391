"""LiteLLM."""

from __future__ import annotations

from typing import Any

import litellm

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

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
GATEWAY: Any = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "temperature": 0, "num_retries": 0}


def stream() -> None:
    """Join a stream's chunks to the whole answer, by hand and by the library."""
    whole = litellm.completion(messages=MESSAGES, max_tokens=20, **GATEWAY)
    chunks = list(litellm.completion(messages=MESSAGES, max_tokens=20, stream=True, **GATEWAY))
    check_stream([chunk.choices[0].delta.content or "" for chunk in chunks], whole.choices[0].message.content)
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == whole.choices[0].message.content


def tools() -> None:
    """Send the model's call back, as the library has it and as a dictionary, with the result."""
    function = {"name": TOOL, "description": "Forecast of a city", "parameters": SCHEMA}
    chat = {"tools": [{"type": "function", "function": function}], **GATEWAY}
    choice = {"type": "function", "function": {"name": TOOL}}
    called = litellm.completion(messages=MESSAGES, tool_choice=choice, **chat).choices[0]
    assert called.finish_reason == "tool_calls"
    call = called.message.tool_calls[0]
    check_weather(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    answers = [
        litellm.completion(messages=[*MESSAGES, message, result], max_tokens=20, **chat).choices[0].message.content
        for message in (called.message, called.message.model_dump())
    ]
    assert answers[0]
    assert answers[0] == answers[1]


def schema() -> None:
    """Get an answer that is JSON of a model's schema."""
    answer = litellm.completion(messages=MESSAGES, response_format=Weather, **GATEWAY)
    check_weather(answer.choices[0].message.content)


def overflow() -> None:
    """Get the library's own error for a prompt that is too long, also of a stream."""
    messages = [{"role": "user", "content": TOO_LONG}]
    chat: Any = {"messages": messages, **GATEWAY}
    check_refused(lambda: litellm.completion(**chat), litellm.ContextWindowExceededError)
    check_refused(lambda: list(litellm.completion(stream=True, **chat)), litellm.ContextWindowExceededError)


if __name__ == "__main__":
    run(stream, tools, schema, overflow)
