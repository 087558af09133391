"""Chats whose texts a template joins with its own special tokens: no text of them reads as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from router.request import Chat, ChatMessage, Tool, ToolCall


def shielded_chat(chat: Chat, shield: Callable[[str], str]) -> Chat:
    """Return a chat with every text of its messages and tools shielded."""
    return replace(
        chat,
        messages=tuple(_message(message, shield) for message in chat.messages),
        tools=tuple(_tool(tool, shield) for tool in chat.tools),
    )


def _message(message: ChatMessage, shield: Callable[[str], str]) -> ChatMessage:
    return replace(
        message,
        content=shield(message.content),
        parts=tuple(map(shield, message.parts)),
        tool_calls=tuple(_call(call, shield) for call in message.tool_calls),
        tool_call_id=shield(message.tool_call_id),
        name=shield(message.name),
        reasoning=shield(message.reasoning),
    )


def _call(call: ToolCall, shield: Callable[[str], str]) -> ToolCall:
    return replace(call, id=shield(call.id), name=shield(call.name), arguments=shield(call.arguments))


def _tool(tool: Tool, shield: Callable[[str], str]) -> Tool:
    return replace(
        tool, name=shield(tool.name), description=shield(tool.description), parameters=shield(tool.parameters)
    )
