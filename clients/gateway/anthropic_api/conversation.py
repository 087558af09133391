"""Conversations in Anthropic's words, made into chats: a message for each turn, call's result and system prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clients.gateway.errors import not_served


@dataclass
class Conversation:
    """The messages of a chat, and the place in the request that each comes from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    def add(self, origin: str, **message: Any) -> None:
        """Add a message."""
        self.messages.append(message)
        self.origins.append(origin)


def conversation(request: Mapping[str, Any]) -> Conversation:
    """Return a request's chat. Raises HttpError on a block that is not served."""
    made = Conversation()
    if request.get("system"):
        made.add("system", role="system", content=_text("system", request["system"]))
    for index, message in enumerate(request["messages"]):
        at, content = f"messages[{index}]", message["content"]
        if isinstance(content, str) or message["role"] == "system":
            made.add(at, role=message["role"], content=_text(f"{at}.content", content))
        elif message["role"] == "assistant":
            made.add(at, **_assistant(f"{at}.content", content))
        else:
            _add_user(made, at, content)
    return made


def _add_user(made: Conversation, at: str, blocks: list[Mapping[str, Any]]) -> None:
    """Add the results of calls, each as a message, and then the rest."""
    rest = []
    for index, block in enumerate(blocks):
        place = f"{at}.content[{index}]"
        if block["type"] == "tool_result":
            content = _text(f"{place}.content", block.get("content", ""))
            made.add(place, role="tool", tool_call_id=block["tool_use_id"], content=content)
        else:
            rest.append({"type": "text", "text": _text_of(place, block)})
    if rest:
        made.add(at, role="user", content=rest[0]["text"] if len(rest) == 1 else rest)


def _assistant(at: str, blocks: list[Mapping[str, Any]]) -> dict[str, Any]:
    texts, reasoning, calls = [], [], []
    for index, block in enumerate(blocks):
        if block["type"] == "tool_use":
            arguments = json.dumps(block["input"], ensure_ascii=False)
            calls.append({"id": block["id"], "name": block["name"], "arguments": arguments})
        elif block["type"] == "thinking":
            reasoning.append(block["thinking"])
        else:
            texts.append(_text_of(f"{at}[{index}]", block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(at: str, content: str | list[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_of(f"{at}[{index}]", block) for index, block in enumerate(content))


def _text_of(at: str, block: Mapping[str, Any]) -> str:
    if block["type"] != "text":
        raise not_served(f"{at}.type", f"{block['type']} is not served")
    text: str = block["text"]
    return text
