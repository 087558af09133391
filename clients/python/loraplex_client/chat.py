"""Chats as services write them, made into messages of the wire: roles, parts of contents, tools and their calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from loraplex.inference.v1 import inference_pb2

from loraplex_client.errors import InvalidRequestError

T = TypeVar("T")

# A message has a role (`system`, `developer`, `user`, `assistant`, `tool`) and a content: a text, or parts such as
# {"type": "text", "text": ...}. An assistant's may have `tool_calls` and `reasoning`, a tool's has `tool_call_id`.
# A text alone is one message of a user.
ChatMessages: TypeAlias = str | Sequence[Mapping[str, Any]]
# A tool is {"name": ..., "description": ..., "parameters": JSON schema, "strict": whether a schema that cannot be
# enforced is refused}, or that as the `function` of another object.
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` is a JSON object as the model wrote it."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        """Return the arguments. Raises ValueError where an answer was cut in the middle of them."""
        value = json.loads(self.arguments)
        if not isinstance(value, dict):
            raise ValueError(f"the arguments of {self.name} are not an object")
        return value


@dataclass(frozen=True)
class ToolCallPart:
    """A part of a call in a stream: the first has its id and name, each the next characters of its arguments."""

    index: int
    id: str
    name: str
    arguments: str


class GrowingCalls:
    """The calls of a choice, put together of their parts."""

    def __init__(self) -> None:
        self._calls: list[list[str]] = []

    def add(self, parts: Sequence[inference_pb2.ToolCallDelta]) -> tuple[ToolCallPart, ...]:
        """Take parts as they came; return them. Raises IndexError where one is missing."""
        for part in parts:
            if part.index == len(self._calls):
                self._calls.append([part.id, part.name, ""])
            self._calls[part.index][2] += part.arguments
        return tuple(ToolCallPart(part.index, part.id, part.name, part.arguments) for part in parts)

    def whole(self) -> tuple[ToolCall, ...]:
        """Return the calls."""
        return tuple(ToolCall(*call) for call in self._calls)


def message_of(text: str, reasoning: str, tool_calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return an answer as the message to put behind the chat before the next turn."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning"] = reasoning
    if tool_calls:
        message["tool_calls"] = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in tool_calls]
    return message


# Options of a chat beside its messages; the others are fields of the whole request.
CHAT_OPTIONS = (
    "tools", "tool_choice", "parallel_tool_calls", "continue_final_message", "add_generation_prompt", "template_args",
    "thinking_token_budget",
)  # fmt: skip
_MODES = {
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "none": inference_pb2.TOOL_MODE_NONE,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}


def chat_of(messages: ChatMessages, options: Mapping[str, Any] | None = None) -> inference_pb2.Chat:
    """Return the chat as a message; `options` are CHAT_OPTIONS. Raises InvalidRequestError, naming what is wrong."""
    settings = options or {}
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    chat = inference_pb2.Chat(messages=_each("messages", _message, messages))
    chat.tools.extend(_each("tools", _tool, settings.get("tools") or ()))
    if (choice := settings.get("tool_choice")) is not None:
        chat.tool_choice.CopyFrom(_tool_choice(choice))
    for name in (*CHAT_OPTIONS[2:5], "thinking_token_budget"):
        if settings.get(name) is not None:
            try:
                setattr(chat, name, settings[name])
            except (TypeError, ValueError) as error:
                raise InvalidRequestError(f"{name}: {error}", field=name) from error
    if (variables := settings.get("template_args")) is not None:
        chat.template_args = _json(variables)
    return chat


def _each(name: str, convert: Callable[[Any], T], values: Sequence[Any]) -> list[T]:
    converted = []
    for index, value in enumerate(values):
        try:
            converted.append(convert(value))
        except KeyError as error:
            raise InvalidRequestError(f"{name}[{index}]: has no {error}", field=f"{name}[{index}]") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"{name}[{index}]: {error}", field=f"{name}[{index}]") from error
    return converted


def _message(written: Mapping[str, Any]) -> inference_pb2.ChatMessage:
    if not isinstance(written, Mapping):
        raise TypeError(f'give a message such as {{"role": "user", "content": "hi"}}, not a {type(written).__name__}')
    fields = {name: value for name, value in written.items() if value is not None}
    content = fields.pop("content", "")
    message = inference_pb2.ChatMessage(role=fields.pop("role"))
    if isinstance(content, str):
        message.content = content
    else:
        message.parts.extend(_part(part) for part in content)
    message.tool_calls.extend(_tool_call(call) for call in fields.pop("tool_calls", ()))
    # Reasoning has several names elsewhere.
    message.reasoning = fields.pop("reasoning", "") or fields.pop("reasoning_content", "")
    for name, value in fields.items():
        if name not in ("name", "tool_call_id"):
            raise ValueError(f"{name!r} is not a key of a message")
        setattr(message, name, value)
    return message


def _part(part: Mapping[str, Any]) -> inference_pb2.ContentPart:
    return inference_pb2.ContentPart(type=part.get("type", ""), text=part.get("text", ""))


def _tool_call(call: Mapping[str, Any]) -> inference_pb2.ToolCall:
    function = call.get("function", call)
    return inference_pb2.ToolCall(
        id=call.get("id") or "", name=function["name"], arguments=_json(function.get("arguments") or {})
    )


def _tool(tool: Mapping[str, Any]) -> inference_pb2.Tool:
    function = tool.get("function", tool)
    parameters = function.get("parameters")
    return inference_pb2.Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters="" if parameters is None else _json(parameters),
        strict=bool(function.get("strict")),
    )


def _tool_choice(choice: str | Mapping[str, Any]) -> inference_pb2.ToolChoice:
    if isinstance(choice, str):
        if choice not in _MODES:
            raise InvalidRequestError(
                f"tool_choice: {choice!r} is not one of {', '.join(_MODES)}; name a tool as {{'name': ...}}",
                field="tool_choice",
            )
        return inference_pb2.ToolChoice(mode=_MODES[choice])
    try:
        return inference_pb2.ToolChoice(name=choice.get("function", choice)["name"])
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidRequestError("tool_choice: is no mode, and has no name", field="tool_choice") from error


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
