"""DSPy. It takes a server's abilities from a declaration, and asks for no schema and no calls without one."""

from __future__ import annotations

from typing import Any

import dspy
from dspy.adapters.types.tool import ToolCallResults
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

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

gateway = ProviderDefinition.chat(
    AccessPolicy(provider="loraplex", base_url=f"{URL}/v1"), compat=OpenAIChatCompat(instruction_role="system")
)
register_provider(gateway, supports=ModelSupport(function_calling=True, response_schema=True))
lm = dspy.LM(f"loraplex/{MODEL}", api_key=KEY, temperature=0, max_tokens=100, cache=False, num_retries=0)
# Maximum number of seeds that are tried for a call. DSPy's schemas of tools allow further properties, and a tiny model
# likes to add some.
SEEDS = 50


class Ask(dspy.Signature):  # type: ignore[misc]
    """Forecast the weather."""

    question: str = dspy.InputField()
    weather: Weather = dspy.OutputField()


class Call(dspy.Signature):  # type: ignore[misc]
    """Forecast the weather."""

    question: str = dspy.InputField()
    history: dspy.History = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


class Either(dspy.Signature):  # type: ignore[misc]
    """Forecast the weather."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    weather: Weather = dspy.OutputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def stream() -> None:
    """Join a stream's chunks to the whole answer."""
    program = dspy.streamify(dspy.Predict(Ask), async_streaming=False)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        *chunks, prediction = program(question=QUESTION)
    check_weather(prediction.weather.model_dump())
    check_stream([chunk.choices[0].delta.content or "" for chunk in chunks], lm.history[-1]["outputs"][0])


def tools() -> None:
    """Run the tool that the model calls, and call again with the call and its result in the history."""
    tool = dspy.Tool(lambda city, days: RESULT, name=TOOL, desc="Forecast of a city", args=SCHEMA["properties"])

    def call(history: dspy.History) -> Any:
        for seed in range(SEEDS):
            config = {
                "tool_choice": {"type": "function", "function": {"name": TOOL}}, "temperature": 1.0, "seed": seed
            }  # fmt: skip
            calls = dspy.Predict(Call)(question=QUESTION, history=history, tools=[tool], config=config).calls
            if calls.tool_calls[0].args.keys() == SCHEMA["properties"].keys():
                return calls
        raise AssertionError("no call without properties beyond the schema's")

    with dspy.context(lm=lm, adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        calls = call(dspy.History(messages=[]))
        check_weather(calls.tool_calls[0].args)
        results = ToolCallResults.from_tool_calls_and_values(calls, [tool(**calls.tool_calls[0].args)])
        made = calls.model_copy(update={"tool_call_results": results})
        check_weather(call(dspy.History(messages=[{"question": QUESTION, "calls": made}])).tool_calls[0].args)
    assert [message["role"] for message in lm.history[-1]["messages"]][-3:] == ["assistant", "tool", "user"]


def schema() -> None:
    """Parse an answer into a signature's fields."""
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        check_weather(dspy.Predict(Ask)(question=QUESTION).weather.model_dump())


def both() -> None:
    """Get calls or fields of a signature: the JSONAdapter sends tools and a schema in one request."""
    tool = dspy.Tool(lambda city, days: RESULT, name=TOOL, desc="Forecast of a city", args=SCHEMA["properties"])
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        for seed in range(5):
            config = {"temperature": 1.0, "seed": seed}
            found = dspy.Predict(Either)(question=QUESTION, tools=[tool], config=config)
            assert {"tools", "response_format"} <= lm.history[-1]["kwargs"].keys()
            calls = found.calls.tool_calls if found.calls else []
            assert {call.name for call in calls} <= {TOOL}, calls
            if not calls:
                check_weather(found.weather.model_dump())


def overflow() -> None:
    """Get the library's own error for a prompt that is too long."""
    check_refused(lambda: lm(TOO_LONG), dspy.ContextWindowExceededError)


if __name__ == "__main__":
    run(stream, tools, schema, both, overflow)
