"""LangChain, by its package for OpenAI."""

from __future__ import annotations

from typing import Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

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

llm = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=100, max_retries=0)


@tool(args_schema=Weather)  # type: ignore[untyped-decorator]
def weather(city: str, days: int) -> str:
    """Forecast of a city."""
    check_weather({"city": city, "days": days})
    return RESULT


def stream() -> None:
    """Join a stream's chunks to the whole answer."""
    chunks = list(llm.stream(QUESTION))
    check_stream([chunk.content for chunk in chunks], llm.invoke(QUESTION).content)


def tools() -> None:
    """Run the tool that the model calls, and send back the call, as the library has it, with the result."""
    called = llm.bind_tools([weather], tool_choice=TOOL, strict=True).invoke(QUESTION)
    (call,) = called.tool_calls
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content == RESULT
    answer = llm.bind_tools([weather], strict=True).invoke([HumanMessage(QUESTION), called, result])
    assert answer.content


def schema() -> None:
    """Parse an answer into a model."""
    for method in ("json_schema", "function_calling"):
        answer: Any = llm.with_structured_output(Weather, method=method).invoke(QUESTION)
        check_weather(answer.model_dump())


def overflow() -> None:
    """Get the library's own error for a prompt that is too long."""
    check_refused(lambda: llm.invoke(TOO_LONG), ContextOverflowError)


if __name__ == "__main__":
    run(stream, tools, schema, overflow)
