"""The client of the Hugging Face Hub's package."""

from __future__ import annotations

from typing import Any

from huggingface_hub import InferenceClient
from huggingface_hub.errors import BadRequestError

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

client = InferenceClient(base_url=URL, api_key=KEY)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


def stream() -> None:
    """Join a stream's chunks to the whole answer."""
    chat: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    whole = client.chat_completion(**chat)
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat_completion(**chat, stream=True)]
    check_stream(parts, whole.choices[0].message.content)


def tools() -> None:
    """Send the model's call back, as the library has it, with the result."""
    function = {"name": TOOL, "description": "Forecast of a city", "parameters": SCHEMA}
    chat: Any = {"model": MODEL, "tools": [{"type": "function", "function": function}], "temperature": 0}
    choice: Any = {"function": {"name": TOOL}}
    called = client.chat_completion(MESSAGES, tool_choice=choice, **chat).choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.tool_calls
    call = called.message.tool_calls[0]
    check_weather(call.function.arguments)
    messages = [*MESSAGES, called.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    assert client.chat_completion(messages, max_tokens=20, **chat).choices[0].message.content


def schema() -> None:
    """Get an answer that is JSON of a schema."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    answer = client.chat_completion(MESSAGES, model=MODEL, response_format=form, temperature=0)
    check_weather(answer.choices[0].message.content or "")


def overflow() -> None:
    """Get the error for a prompt that is too long."""
    messages: Any = [{"role": "user", "content": TOO_LONG}]
    check_refused(lambda: client.chat_completion(messages, model=MODEL), BadRequestError)


if __name__ == "__main__":
    run(stream, tools, schema, overflow)
