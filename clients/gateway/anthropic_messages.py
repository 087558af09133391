"""Messages of Anthropic's protocol: those of any client, and answers of any server that are sent back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Required

from pydantic import ConfigDict, Discriminator, Tag, with_config
from typing_extensions import TypedDict

from clients.gateway.conversation import ChatBuilder
from clients.gateway.errors import not_served


class TextBlock(TypedDict):
    """A text."""

    type: Literal["text"]
    text: str


class ToolUse(TypedDict, total=False):
    """A call of a tool by the model."""

    type: Required[Literal["tool_use"]]
    id: str
    name: Required[str]
    input: Any


class Thinking(TypedDict, total=False):
    """The reasoning of an answer; what Anthropic signed or encrypted of it is ignored."""

    type: Required[Literal["thinking"]]
    thinking: str


@with_config(ConfigDict(extra="allow"))
class Other(TypedDict):
    """A block of another kind; it is read so that the error can name it."""

    type: str


# Reasoning that Anthropic alone can read.
_REDACTED = "redacted_thinking"
_BLOCKS = {"text": "Text", "tool_use": "Use", "tool_result": "Result", "thinking": "Thinking"}


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return _BLOCKS.get(kind, "Other") if isinstance(kind, str) else "Text"


def _text_kind(block: Any) -> str:
    return "Other" if _kind(block) != "Text" else "Text"


TextOrOther = Annotated[Annotated[TextBlock, Tag("Text")] | Annotated[Other, Tag("Other")], Discriminator(_text_kind)]


class ToolResult(TypedDict, total=False):
    """The result of a call."""

    type: Required[Literal["tool_result"]]
    tool_use_id: str
    content: str | list[TextOrOther]


Block = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ToolUse, Tag("Use")]
    | Annotated[ToolResult, Tag("Result")]
    | Annotated[Thinking, Tag("Thinking")]
    | Annotated[Other, Tag("Other")],
    Discriminator(_kind),
]


class Message(TypedDict):
    """A message of any role."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


# Kinds whose unknown fields are ignored.
LENIENT = (Message, TextBlock, ToolUse, ToolResult, Thinking)


def conversation(request: Mapping[str, Any]) -> ChatBuilder:
    """Return a request's chat. Raises HttpError on a block that is not served."""
    chat = ChatBuilder()
    if request.get("system"):
        chat.add("system", role="system", content=_text("system", request["system"]))
    for index, message in enumerate(request["messages"]):
        at, content = f"messages[{index}]", message["content"]
        if isinstance(content, str) or message["role"] == "system":
            chat.add(at, role=message["role"], content=_text(f"{at}.content", content))
        elif message["role"] == "assistant":
            chat.add(at, **_assistant(f"{at}.content", content))
        else:
            _add_user(chat, at, content)
    return chat


def _add_user(chat: ChatBuilder, at: str, blocks: Sequence[Mapping[str, Any]]) -> None:
    """Add the results of calls, each as a message, and then the rest."""
    rest = []
    for index, block in enumerate(blocks):
        place = f"{at}.content[{index}]"
        if block["type"] == "tool_result":
            content = _text(f"{place}.content", block.get("content", ""))
            chat.add(place, role="tool", tool_call_id=block.get("tool_use_id"), content=content)
        else:
            rest.append({"type": "text", "text": _text_of(place, block)})
    if rest:
        chat.add(at, role="user", content=rest[0]["text"] if len(rest) == 1 else rest)


def _assistant(at: str, blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts, reasoning, calls = [], [], []
    for index, block in enumerate(blocks):
        if block["type"] == "tool_use":
            given = block.get("input")
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            calls.append({"id": block.get("id"), "name": block["name"], "arguments": arguments})
        elif block["type"] == "thinking":
            reasoning.append(block.get("thinking", ""))
        elif block["type"] != _REDACTED:
            texts.append(_text_of(f"{at}[{index}]", block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(at: str, content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_of(f"{at}[{index}]", block) for index, block in enumerate(content))


def _text_of(at: str, block: Mapping[str, Any]) -> str:
    if block["type"] != "text":
        raise not_served(f"{at}.type", f"{block['type'][:100]} is not served")
    text: str = block["text"]
    return text
