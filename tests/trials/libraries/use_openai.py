"""OpenAI's client for Python: chats, the Responses API and decisions."""

from __future__ import annotations

from typing import Any

import openai

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

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
WEATHER: Any = {"name": TOOL, "description": "Forecast of a city", "parameters": SCHEMA, "strict": True}


def stream() -> None:
    """Join a stream's chunks to the whole answer; the last one has the usage."""
    chat: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**chat)
    chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    check_stream(parts, whole.choices[0].message.content)
    assert chunks[-1].usage
    assert whole.usage
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def tools() -> None:
    """Send the model's call back, as the library has it and as a dictionary, with the result."""
    chat: Any = {"model": MODEL, "tools": [{"type": "function", "function": WEATHER}], "temperature": 0}
    choice: Any = {"type": "function", "function": {"name": TOOL}}
    called = client.chat.completions.create(messages=MESSAGES, tool_choice=choice, **chat).choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.tool_calls
    call: Any = called.message.tool_calls[0]
    check_weather(call.function.arguments)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    answers = [
        client.chat.completions.create(messages=[*MESSAGES, message, result], max_tokens=20, **chat).choices[0].message
        for message in (called.message, called.message.model_dump())
    ]
    assert answers[0].content
    assert answers[0].content == answers[1].content
    # The next turn, after an answer without calls.
    messages: Any = [*MESSAGES, answers[0].model_dump(), {"role": "user", "content": QUESTION}]
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2).choices[0].message.content


def schema() -> None:
    """Parse an answer into a model."""
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Weather, temperature=0)
    parsed = answer.choices[0].message.parsed
    assert parsed
    check_weather(parsed.model_dump())


def overflow() -> None:
    """Get the error, with its code, for a prompt that is too long."""
    messages: Any = [{"role": "user", "content": TOO_LONG}]
    error = check_refused(
        lambda: client.chat.completions.create(model=MODEL, messages=messages), openai.BadRequestError
    )
    assert error.code == "context_length_exceeded"


def responses_stream() -> None:
    """Join a stream's deltas to the whole answer, and continue it by its id."""
    asked: Any = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 20}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        parts = [event.delta for event in events if event.type == "response.output_text.delta"]
    check_stream(parts, whole.output_text)
    second = client.responses.create(**asked, previous_response_id=whole.id)
    assert second.output_text
    assert second.usage
    assert whole.usage
    assert second.usage.input_tokens > whole.usage.input_tokens


def responses_tools() -> None:
    """Send a call's result with the id of the answer, and with the items of the answer: both get the same answer."""
    asked: Any = {"model": MODEL, "tools": [{"type": "function", **WEATHER}], "temperature": 0}
    choice: Any = {"type": "function", "name": TOOL}
    with client.responses.stream(input=QUESTION, tool_choice=choice, **asked) as events:
        arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
        called = events.get_final_response()
    (call,) = (item for item in called.output if item.type == "function_call")
    check_weather(call.arguments)
    assert arguments == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    by_id = client.responses.create(input=[result], previous_response_id=called.id, max_output_tokens=20, **asked)
    items: Any = [{"role": "user", "content": QUESTION}, *called.output, result]
    by_items = client.responses.create(input=items, max_output_tokens=20, **asked)
    assert by_id.output_text
    assert by_id.output_text == by_items.output_text


def responses_schema() -> None:
    """Parse an answer into a model."""
    parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather, temperature=0).output_parsed
    assert parsed
    check_weather(parsed.model_dump())


def decisions() -> None:
    """Ask a question of each kind at once, and each alone: the answers are the same."""
    questions: Any = [
        {"type": "predicate", "name": "money", "instructions": "It is about money."},
        {"type": "choice", "instructions": "Which team?", "choices": [{"value": "billing"}, {"value": True}]},
        {"type": "score", "instructions": "How angry?", "levels": [{"label": "calm"}, {"label": "angry"}]},
    ]
    asked: Any = {"model": MODEL, "input": [{"role": "user", "content": "I was charged twice."}]}
    answer = client.decisions.create(questions=questions, **asked)
    money, team, anger = answer.answers
    assert money.type == "predicate"
    assert money.name == "money"
    assert team.type == "choice"
    assert [one.value for one in team.probabilities] == ["billing", True]
    assert anger.type == "score"
    assert abs(sum(one.probability for one in anger.probabilities) - 1) < 1e-9
    assert answer.usage.output_tokens == 0
    for question, told in zip(questions, answer.answers, strict=True):
        (alone,) = client.decisions.create(questions=[question], **asked).answers
        assert alone == told


if __name__ == "__main__":
    run(stream, tools, schema, overflow, responses_stream, responses_tools, responses_schema, decisions)
