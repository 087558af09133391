"""Messages of chats in OpenAI's protocol: those of any client, and answers of any server that are sent back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from loraplex.gateway.errors import HttpError, not_served


class TextPart(TypedDict, total=False):
    """A part of a content: a text, of the request or of an answer."""

    type: Required[Literal["input_text", "output_text", "text"]]
    text: Required[str]


class RefusalPart(TypedDict):
    """A part of a content: an answer that declined."""

    type: Literal["refusal"]
    refusal: str


@with_config(ConfigDict(extra="allow"))
class Other(TypedDict):
    """A part, an item or a tool of another kind; it is read so that the error can name it."""

    type: str


Part = TextPart | RefusalPart | Other
_PARTS = ("input_text", "output_text", "text", "refusal")


def text_of(at: str, content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a content. Raises HttpError on a part that is none."""
    return content if isinstance(content, str) else "".join(texts_of(at, content))


def texts_of(at: str, parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts of a content's parts. Raises HttpError on a part that is none."""
    for index, part in enumerate(parts):
        if part["type"] not in _PARTS:
            raise not_served(f"{at}[{index}].type", f"{part['type'][:100]} is not served, only text")
    return [part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts]


class CalledFunction(TypedDict, total=False):
    """The function of a call; some servers give its arguments as an object."""

    name: Required[str]
    arguments: str | dict[str, Any]


class ChatToolCall(TypedDict, total=False):
    """A call of a function by the model. Some servers leave out its type and its id."""

    id: str
    type: str
    function: CalledFunction


class OpenAIMessage(TypedDict, total=False):
    """A message of any role."""

    role: Required[Literal["system", "developer", "user", "assistant", "tool", "function"]]
    content: str | list[Part]
    name: str
    tool_calls: list[ChatToolCall]
    tool_call_id: str
    # The text of a refusal, which an answer has in place of its content.
    refusal: str
    # The reasoning of an answer: DeepSeek's name and OpenRouter's.
    reasoning_content: str
    reasoning: str
    # OpenAI's first form of calls.
    function_call: CalledFunction
    # Ollama's place for images, which would be lost.
    images: list[Any]


# Kinds whose unknown fields are ignored.
LENIENT = (OpenAIMessage, TextPart, RefusalPart, ChatToolCall, CalledFunction)
# Roles whose messages may have no content: an answer that is only calls, the result of a function that returns nothing.
_MAY_BE_EMPTY = ("assistant", "tool", "function")


def sdk_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as the SDK takes them. Raises HttpError on what is not served."""
    return [_sdk_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _sdk_message(at: str, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message["role"]
    if message.get("images"):
        raise not_served(f"{at}.images")
    if "content" not in message and role not in _MAY_BE_EMPTY:
        raise HttpError(400, "missing_required_parameter", f"{at}.content: is required", f"{at}.content")
    content = message.get("content") or message.get("refusal") or ""
    if not isinstance(content, str):
        content = [{"type": "text", "text": text} for text in texts_of(f"{at}.content", content)]
    made: dict[str, Any] = {"role": "tool" if role == "function" else role, "content": content}
    if message.get("name"):
        made["name"] = message["name"]
    if role == "tool" and message.get("tool_call_id"):
        made["tool_call_id"] = message["tool_call_id"]
    if role == "assistant":
        made["reasoning"] = message.get("reasoning_content") or message.get("reasoning")
        made["tool_calls"] = _calls(at, message)
    return made


def _calls(at: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = []
    for index, call in enumerate(message.get("tool_calls") or ()):
        if "function" not in call:
            field = f"{at}.tool_calls[{index}]"
            if (kind := call.get("type", "function")) != "function":
                raise not_served(f"{field}.type", f"{kind[:100]} is not served, only function")
            raise HttpError(400, "missing_required_parameter", f"{field}.function: is required", f"{field}.function")
        calls.append({"id": call.get("id"), **call["function"]})
    if not calls and message.get("function_call"):
        calls.append({"id": None, **message["function_call"]})
    return calls
