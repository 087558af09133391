"""Conversion of a chat's messages to domain objects, with every check that needs only the message.

JSON in a chat (arguments, schemas, template variables) is parsed where it is rendered, in a child process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from loraplex.inference.v1 import inference_pb2 as pb

from router.request import Chat, ChatMessage, Tool, ToolCall, ToolMode
from rpc.errors import InvalidField, NotBuilt

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOLS = 128
# Maximum bytes of all tools together, and of the variables for the template.
TOOLS_BYTES = 256 * 1024
TEMPLATE_ARGS_BYTES = 16 * 1024
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MODES = {
    pb.TOOL_MODE_UNSPECIFIED: ToolMode.AUTO,
    pb.TOOL_MODE_AUTO: ToolMode.AUTO,
    pb.TOOL_MODE_NONE: ToolMode.NONE,
    pb.TOOL_MODE_REQUIRED: ToolMode.REQUIRED,
}


def read_chat(chat: pb.Chat) -> Chat:
    """Return the chat in a message. Raises InvalidField or NotBuilt, naming the field."""
    if not chat.messages:
        raise InvalidField("chat.messages", "is empty")
    if len(chat.template_args.encode()) > TEMPLATE_ARGS_BYTES:
        raise InvalidField("chat.template_args", f"is larger than {TEMPLATE_ARGS_BYTES} bytes")
    tools = _tools(chat.tools)
    mode, name = _tool_choice(chat, {tool.name for tool in tools})
    continued, last = chat.continue_final_message, len(chat.messages) - 1
    if continued and chat.messages[last].role != "assistant":
        raise InvalidField(f"chat.messages[{last}].role", "only an assistant's message can be continued")
    prompted = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continued
    if continued and prompted:
        raise InvalidField("chat.add_generation_prompt", "true cannot be combined with continue_final_message")
    return Chat(
        messages=tuple(_message(f"chat.messages[{index}]", turn) for index, turn in enumerate(chat.messages)),
        # An answer without calls comes from a prompt without tools.
        tools=() if mode is ToolMode.NONE else tools,
        tool_mode=mode,
        tool_name=name,
        parallel_tool_calls=not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls,
        continue_final_message=continued,
        add_generation_prompt=prompted,
        template_args=chat.template_args,
    )


def _message(field: str, turn: pb.ChatMessage) -> ChatMessage:
    if turn.role not in ROLES:
        raise InvalidField(f"{field}.role", f"{turn.role!r} is none of {', '.join(ROLES)}")
    if turn.content and turn.parts:
        raise InvalidField(f"{field}.parts", "give either content or parts")
    for index, part in enumerate(turn.parts):
        if part.type not in ("", "text"):
            raise NotBuilt(f"{field}.parts[{index}].type={part.type}")
    if turn.role != "assistant":
        for name in ("tool_calls", "reasoning"):
            if getattr(turn, name):
                raise InvalidField(f"{field}.{name}", f"only an assistant's message has it, not one of {turn.role}")
    if turn.tool_call_id and turn.role != "tool":
        raise InvalidField(f"{field}.tool_call_id", f"only a tool's message has it, not one of {turn.role}")
    return ChatMessage(
        role=turn.role,
        content=turn.content,
        parts=tuple(part.text for part in turn.parts),
        tool_calls=tuple(
            _tool_call(f"{field}.tool_calls[{index}]", call) for index, call in enumerate(turn.tool_calls)
        ),
        tool_call_id=turn.tool_call_id,
        name=turn.name,
        reasoning=turn.reasoning,
    )


def _tool_call(field: str, call: pb.ToolCall) -> ToolCall:
    if not call.name:
        raise InvalidField(f"{field}.name", "is empty")
    return ToolCall(call.id, call.name, call.arguments)


def _tools(tools: Sequence[pb.Tool]) -> tuple[Tool, ...]:
    if len(tools) > TOOLS:
        raise InvalidField("chat.tools", f"{len(tools)} tools; at most {TOOLS}")
    if sum(tool.ByteSize() for tool in tools) > TOOLS_BYTES:
        raise InvalidField("chat.tools", f"are larger than {TOOLS_BYTES} bytes")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"chat.tools[{index}].name"
        if not _TOOL_NAME.fullmatch(tool.name):
            raise InvalidField(field, f"{tool.name[:80]!r} is not 1 to 64 letters, digits, '_' and '-'")
        if tool.name in seen:
            raise InvalidField(field, f"{tool.name} is there twice")
        seen.add(tool.name)
    return tuple(Tool(tool.name, tool.description, tool.parameters) for tool in tools)


def _tool_choice(chat: pb.Chat, names: set[str]) -> tuple[ToolMode, str]:
    """Return the mode, and the tool that has to be called where one is named."""
    choice = chat.tool_choice
    if choice.WhichOneof("choice") == "name":
        if choice.name not in names:
            raise InvalidField("chat.tool_choice.name", f"{choice.name!r} is none of chat.tools")
        mode, name = ToolMode.REQUIRED, choice.name
    elif choice.mode in _MODES:
        mode, name = _MODES[choice.mode], ""
    else:
        raise InvalidField("chat.tool_choice.mode", f"{choice.mode} is not a ToolMode that this version knows")
    if mode is ToolMode.REQUIRED and not names:
        raise InvalidField("chat.tools", "is empty; chat.tool_choice asks for a call")
    return mode, name
