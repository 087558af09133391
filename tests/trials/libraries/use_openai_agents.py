"""OpenAI's Agents SDK, over chats and over the Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import openai
from agents import (
    Agent,
    FunctionTool,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

from tests.trials.libraries.scenarios import (
    KEY,
    MODEL,
    QUESTION,
    RESULT,
    TOO_LONG,
    TOOL,
    URL,
    check_refused,
    check_stream,
    check_weather,
    run,
)
from tests.trials.libraries.weather import Weather

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0, max_tokens=100)


def models() -> Sequence[Model]:
    """Return the model in both protocols, with connections of their own."""
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    return (
        OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
        OpenAIResponsesModel(model=MODEL, openai_client=client),
    )


def stream() -> None:
    """Join a stream's deltas to the whole answer."""
    asyncio.run(_stream())


async def _stream() -> None:
    for model in models():
        agent = Agent("forecaster", model=model, model_settings=SETTINGS)
        parts = [
            event.data.delta
            async for event in Runner.run_streamed(agent, QUESTION).stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        check_stream(parts, (await Runner.run(agent, QUESTION)).final_output)


def forecast(asked: list[Weather]) -> FunctionTool:
    """Return a tool that keeps its arguments."""

    def forecast_of(city: Weather) -> str:
        """Forecast of a city."""
        asked.append(city)
        return RESULT

    return function_tool(forecast_of, name_override=TOOL)


def tools() -> None:
    """Let an agent run the tool that the model calls, answer with its result, and go on in a next turn."""
    for model in models():
        asked: list[Weather] = []
        first = ModelSettings(temperature=0, max_tokens=100, tool_choice=TOOL)
        agent = Agent("forecaster", model=model, tools=[forecast(asked)], model_settings=first)
        turn = Runner.run_sync(agent, QUESTION)
        assert asked
        assert turn.final_output
        plain = Agent("forecaster", model=model, model_settings=SETTINGS)
        assert Runner.run_sync(plain, [*turn.to_input_list(), {"role": "user", "content": QUESTION}]).final_output


def schema() -> None:
    """Parse an answer into a model."""
    for model in models():
        agent = Agent("forecaster", model=model, model_settings=SETTINGS, output_type=Weather)
        check_weather(Runner.run_sync(agent, QUESTION).final_output.model_dump())


def overflow() -> None:
    """Get OpenAI's error for a prompt that is too long."""
    for model in models():
        agent = Agent("forecaster", model=model, model_settings=SETTINGS)
        check_refused(partial(Runner.run_sync, agent, TOO_LONG), openai.BadRequestError)


if __name__ == "__main__":
    run(stream, tools, schema, overflow)
