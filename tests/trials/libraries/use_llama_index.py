"""LlamaIndex, by its package for servers that are like OpenAI's."""

from __future__ import annotations

import openai
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

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

llm = OpenAILike(
    MODEL,
    api_base=f"{URL}/v1",
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    temperature=0,
    max_tokens=100,
    max_retries=0,
)
ASKED = ChatMessage(QUESTION)


def stream() -> None:
    """Join a stream's deltas to the whole answer."""
    parts = [part.delta or "" for part in llm.stream_chat([ASKED])]
    check_stream(parts, llm.chat([ASKED]).message.content)


def tools() -> None:
    """Run the tool that the model calls, and send back the call, as the library has it, with the result."""

    def forecast(city: str, days: int) -> str:
        check_weather({"city": city, "days": days})
        return RESULT

    tool = FunctionTool.from_defaults(forecast, name=TOOL, description="Forecast of a city", fn_schema=Weather)
    called = llm.chat_with_tools([tool], chat_history=[ASKED], tool_required=True, tool_choice=TOOL)
    (call,) = llm.get_tool_calls_from_response(called)
    result = ChatMessage(
        tool(**call.tool_kwargs).content, role=MessageRole.TOOL, additional_kwargs={"tool_call_id": call.tool_id}
    )
    answer = llm.chat_with_tools([tool], chat_history=[ASKED, called.message, result])
    assert answer.message.content


def schema() -> None:
    """Parse an answer into a model."""
    check_weather(llm.structured_predict(Weather, PromptTemplate(QUESTION)).model_dump())


def overflow() -> None:
    """Get the error of OpenAI's client for a prompt that is too long."""
    check_refused(lambda: llm.chat([ChatMessage(TOO_LONG)]), openai.BadRequestError)


if __name__ == "__main__":
    run(stream, tools, schema, overflow)
