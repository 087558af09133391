"""Pydantic AI."""

from __future__ import annotations

from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.exceptions import ModelContextWindowExceededError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

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

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))
# Maximum number of answers of which one should call a tool.
SEEDS = 5
SETTINGS = ModelSettings(temperature=0, max_tokens=100)


def stream() -> None:
    """Join a stream's deltas to the whole answer."""
    agent = Agent(model, model_settings=SETTINGS)
    parts = list(agent.run_stream_sync(QUESTION).stream_text(delta=True, debounce_by=None))
    check_stream(parts, agent.run_sync(QUESTION).output)


def tools() -> None:
    """Let an agent run the tool that the model calls, and answer with its result."""

    def first_the_tool(context: RunContext[None]) -> ModelSettings:
        return ModelSettings(**SETTINGS, tool_choice=[TOOL] if context.run_step == 1 else "none")

    results = []

    def weather(asked: Weather) -> str:
        """Forecast of a city."""
        check_weather(asked.model_dump())
        results.append(RESULT)
        return RESULT

    agent = Agent(model, tools=[weather], model_settings=first_the_tool)
    first = agent.run_sync(QUESTION)
    assert first.output
    assert results == [RESULT]
    # The next turn has the calls of the first.
    assert agent.run_sync(QUESTION, message_history=first.all_messages()).output


def schema() -> None:
    """Parse an answer into a model, by a schema and by a tool of the library's own."""
    for output in (NativeOutput(Weather), Weather):
        answer = Agent(model, model_settings=SETTINGS, output_type=output).run_sync(QUESTION)
        check_weather(answer.output.model_dump())


def both() -> None:
    """Let the model call a tool or answer in a schema, which go into one request; run the tool, and get the answer."""
    ran: list[str] = []

    def weather(asked: Weather) -> str:
        """Forecast of a city."""
        check_weather(asked.model_dump())
        ran.append(RESULT)
        return RESULT

    asked: list[bool] = []
    for seed in range(SEEDS):
        settings = ModelSettings(temperature=1.0, seed=seed, max_tokens=200)
        agent = Agent(model, tools=[weather], output_type=NativeOutput(Weather), model_settings=settings)
        check_weather(agent.run_sync(QUESTION).output.model_dump())
        asked.append(bool(ran))
        if len(set(asked)) == 2:  # it has answered at once, and it has called the tool
            return
    assert asked[0] is False, "each answer calls the tool"


def overflow() -> None:
    """Get the library's own error for a prompt that is too long."""
    check_refused(lambda: Agent(model).run_sync(TOO_LONG), ModelContextWindowExceededError)


if __name__ == "__main__":
    run(stream, tools, schema, both, overflow)
