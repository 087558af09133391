"""A chat on the wire to the chat inside the router: what is read, and what is refused by its field."""

from __future__ import annotations

from typing import Any

import pytest
from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.router.api.convert import read_chat
from loraplex.router.request import ChatMessage, Tool, ToolCall, ToolMode
from loraplex.runtime.rpc.errors import InvalidField, NotBuilt

USER = pb.ChatMessage(role="user", content="hi")
ASSISTANT = pb.ChatMessage(role="assistant", content="The")
TOOL = pb.Tool(name="f", parameters="{}")


def test_names_of_tools_are_as_long_as_those_of_mcp_servers() -> None:
    name = "mcp__server.of-teams__" + "n" * 106
    assert read_chat(pb.Chat(messages=[USER], tools=[pb.Tool(name=name)])).tools[0].name == name


def test_a_chat_is_read_whole() -> None:
    calling = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="1", name="f", arguments="{}")])
    result = pb.ChatMessage(role="tool", tool_call_id="1", name="f", content="rain")
    parts = pb.ChatMessage(role="user", parts=[pb.ContentPart(type="text", text="a"), pb.ContentPart(text="b")])
    chat = read_chat(pb.Chat(messages=[parts, calling, result], tools=[TOOL], parallel_tool_calls=False))
    assert chat.messages == (
        ChatMessage("user", parts=("a", "b")),
        ChatMessage("assistant", tool_calls=(ToolCall("1", "f", "{}"),)),
        ChatMessage("tool", "rain", tool_call_id="1", name="f"),
    )
    assert (chat.tools, chat.tool_mode) == ((Tool("f", "", "{}"),), ToolMode.AUTO)
    assert (chat.parallel_tool_calls, chat.add_generation_prompt) == (False, True)


def test_an_answer_without_calls_comes_from_a_prompt_without_tools() -> None:
    none = pb.ToolChoice(mode=pb.TOOL_MODE_NONE)
    assert read_chat(pb.Chat(messages=[USER], tools=[TOOL], tool_choice=none)).tools == ()


def test_a_continued_message_has_no_prompt_behind_it() -> None:
    chat = read_chat(pb.Chat(messages=[USER, ASSISTANT], continue_final_message=True))
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "chat.messages"),
    ({"messages": [USER, pb.ChatMessage(role="function")]}, "chat.messages[1].role"),
    ({"messages": [pb.ChatMessage(role="user", content="a", parts=[pb.ContentPart()])]}, "chat.messages[0].parts"),
    (
        {"messages": [pb.ChatMessage(role="user", tool_calls=[pb.ToolCall(name="f")])]},
        "chat.messages[0].tool_calls",
    ),
    ({"messages": [pb.ChatMessage(role="user", reasoning="x")]}, "chat.messages[0].reasoning"),
    ({"messages": [pb.ChatMessage(role="user", tool_call_id="x")]}, "chat.messages[0].tool_call_id"),
    (
        {"messages": [pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()])]},
        "chat.messages[0].tool_calls[0].name",
    ),
    ({"messages": [USER], "tools": [pb.Tool(name="a b")]}, "chat.tools[0].name"),
    ({"messages": [USER], "tools": [pb.Tool(name="n" * 129)]}, "chat.tools[0].name"),
    ({"messages": [USER], "tools": [TOOL, TOOL]}, "chat.tools[1].name"),
    ({"messages": [USER], "tools": [pb.Tool(name=f"f{i}") for i in range(129)]}, "chat.tools"),
    ({"messages": [USER], "tools": [pb.Tool(name="f", description="x" * 300_000)]}, "chat.tools"),
    ({"messages": [USER], "tools": [TOOL], "tool_choice": pb.ToolChoice(name="g")}, "chat.tool_choice.name"),
    ({"messages": [USER], "tool_choice": pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)}, "chat.tools"),
    ({"messages": [USER], "template_args": " " * 20_000}, "chat.template_args"),
    ({"messages": [USER], "continue_final_message": True}, "chat.messages[0].role"),
    (
        {"messages": [ASSISTANT], "continue_final_message": True, "add_generation_prompt": True},
        "chat.add_generation_prompt",
    ),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED)
def test_what_is_refused_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read_chat(pb.Chat(**fields))
    assert caught.value.field == field


def test_a_part_of_another_kind_is_not_served() -> None:
    image = pb.ChatMessage(role="user", parts=[pb.ContentPart(type="image_url")])
    with pytest.raises(NotBuilt) as caught:
        read_chat(pb.Chat(messages=[image]))
    assert caught.value.field == "chat.messages[0].parts[0].type=image_url"
