"""Anthropic's protocol: messages, and the count of their tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required

from pydantic import ConfigDict, with_config
from pydantic_core import from_json
from typing_extensions import TypedDict

from loraplex.gateway.bodies import Body
from loraplex.gateway.conversation import SESSION_CHARACTERS, ChatBuilder
from loraplex.gateway.endpoint import HttpCall, Protocol
from loraplex.gateway.errors import HttpError, check_served, invalid, named_model, not_served, renamed
from loraplex.gateway.exchange import encode
from loraplex_client import AsyncGenerationStream, FinishReason, Generation, Piece, ToolCallPart, Usage


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
class Foreign(TypedDict):
    """A block of another kind; it is read so that the error can name it."""

    type: str


# Text in front of the result of a call that failed, for which templates have no field.
_ERROR = "Error: "
# Reasoning that Anthropic alone can read.
_REDACTED = "redacted_thinking"


class ToolResult(TypedDict, total=False):
    """The result of a call."""

    type: Required[Literal["tool_result"]]
    tool_use_id: str
    is_error: Any
    content: str | list[TextBlock | Foreign]


Block = TextBlock | ToolUse | ToolResult | Thinking | Foreign


class AnthropicMessage(TypedDict):
    """A message of any role."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


# Kinds whose unknown fields are ignored.
LENIENT = (AnthropicMessage, TextBlock, ToolUse, ToolResult, Thinking)


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
            content = _ERROR * (block.get("is_error") is True) + _text(f"{place}.content", block.get("content", ""))
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
    return str(block["text"])


REASONS = {
    FinishReason.LENGTH: "max_tokens",
    FinishReason.END: "end_turn",
    FinishReason.STOP: "stop_sequence",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
}
# Names of this protocol for the cluster's.
_NAMES = {
    r"(tools\[\d+\])\.parameters": r"\1.input_schema",
    "json_schema": "output_config.format.schema",
    "template_args": "output_config.effort",
    r"stop\b": "stop_sequences",
    r"(chat\.)?thinking_token_budget": "thinking.budget_tokens",
    "chat$": "messages",
    "adapter$": "model",
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# The temperature where neither request nor model has one: Anthropic's own.
_TEMPERATURE = 1.0
# Type of the tools whose calls the client runs, which they need not have.
_CUSTOM = "custom"


def event(kind: str, **fields: Any) -> bytes:
    """Return an event of a stream."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def error_of(error: HttpError) -> Mapping[str, Any]:
    """Return an error's answer."""
    error = named_model(renamed(error, _NAMES))
    if error.code == "context_exceeded":
        error.message = f"prompt is too long: {error.message}"  # what client libraries look for
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


PROTOCOL = Protocol(error_of, lambda error: event("error", error=error_of(error)["error"]))


def usage_of(usage: Usage) -> dict[str, int]:
    """Return token counts; those of the prompt that were in a prefix cache are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


@with_config(ConfigDict(extra="allow"))
class HostedTool(TypedDict):
    """A tool that Anthropic's servers run; it is read so that the error can name it."""

    type: str


class CustomTool(TypedDict, total=False):
    """A tool that the client runs; prompts are cached anyway."""

    type: Literal["custom", ""] | None
    name: Required[str]
    description: str
    input_schema: Required[dict[str, Any]]
    strict: bool
    allowed_callers: list[str]
    cache_control: Any
    defer_loading: bool
    eager_input_streaming: bool | None
    input_examples: list[dict[str, Any]]


class ToolChoice(TypedDict, total=False):
    """The choice to call tools, or not."""

    type: Required[Literal["auto", "any", "none"]]
    disable_parallel_tool_use: bool


class NamedTool(TypedDict, total=False):
    """The one tool that the model calls."""

    type: Required[Literal["tool"]]
    name: Required[str]
    disable_parallel_tool_use: bool


class OutputFormat(TypedDict):
    """The format of an answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(TypedDict, total=False):
    """The effort of reasoning and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None
    format: OutputFormat | None


class Metadata(TypedDict, total=False):
    """The user of a request."""

    user_id: str | None


# The types of the package `anthropic` would say the same, and its import takes longer than the rest of the gateway's.
class CountRequest(TypedDict, total=False):
    """Body of a request to /v1/messages/count_tokens."""

    model: Required[str]
    messages: Required[list[AnthropicMessage]]
    system: str | list[TextBlock | Foreign]
    tools: list[CustomTool | HostedTool]
    tool_choice: ToolChoice | NamedTool
    output_config: OutputConfig
    speed: Literal["standard", "fast"] | None
    user_profile_id: str
    workspace_id: str
    # Not checked: of thinking, `disabled` and a budget have an effect; prompts are cached, and are the client's own.
    thinking: Any
    cache_control: Any
    context_management: Any
    betas: Any


class MessagesRequest(CountRequest, total=False):
    """Body of a request to /v1/messages. Older versions of the protocol have sampling; json_style is ours."""

    max_tokens: Required[int]
    stop_sequences: list[str]
    metadata: Metadata
    service_tier: Literal["auto", "standard_only"]
    container: Any
    diagnostics: Any
    inference_geo: str | None
    stream: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    json_style: str | list[str] | None


MESSAGES, COUNT = Body(MessagesRequest, LENIENT), Body(CountRequest, LENIENT)

# Fields that are refused, unless their value asks for nothing.
_NOT_SERVED = ("container", "diagnostics", "inference_geo", "user_profile_id", "workspace_id")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def options_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the SDK beside the messages. Raises HttpError on a field that is not served."""
    check_served(request, _NOT_SERVED, {})
    options: dict[str, Any] = {
        "temperature": request.get("temperature"),
        "default_temperature": _TEMPERATURE,
        "top_p": request.get("top_p"),
        "top_k": request.get("top_k"),
        "json_style": request.get("json_style"),
        "max_tokens": request.get("max_tokens"),
        "cap_max_tokens": True,
        "stop": request.get("stop_sequences"),
    }
    if user := (request.get("metadata") or {}).get("user_id"):
        options["session_id"] = user[:SESSION_CHARACTERS]
    if request["messages"] and request["messages"][-1]["role"] == "assistant":
        options["continue_final_message"] = True
    if request.get("tools"):
        options["tools"] = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(request["tools"])]
    if (choice := request.get("tool_choice")) is not None:
        options["tool_choice"] = {"name": choice["name"]} if choice["type"] == "tool" else _CHOICES[choice["type"]]
        options["parallel_tool_calls"] = False if choice.get("disable_parallel_tool_use") else None
    output = request.get("output_config") or {}
    if output.get("format"):
        options["response_format"] = {"type": "json_schema", "schema": output["format"]["schema"]}
    variables = {"reasoning_effort": output["effort"]} if output.get("effort") else {}
    thinking = request.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        variables["enable_thinking"] = False
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        if type(budget := thinking.get("budget_tokens")) is not int or budget < 0:
            raise invalid("thinking.budget_tokens", f"{budget!r} is not a number of tokens")
        options["thinking_token_budget"] = budget
    if variables:
        options["template_args"] = variables
    return options


def _tool(at: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the SDK's words. Raises HttpError."""
    if (kind := tool.get("type") or _CUSTOM) != _CUSTOM:
        raise not_served(f"{at}.type", f"{kind} is run by Anthropic's servers; tools with an input_schema are served")
    return {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool["input_schema"],
        "strict": tool.get("strict"),
    }


async def messages(call: HttpCall) -> None:
    """Answer a conversation, whole or as a stream. Raises HttpError, LoraplexError."""
    request = await call.read(MESSAGES)
    options, chat = options_of(request), conversation(request)
    model = await call.named(request["model"])
    request_id = call.exchange.request_id
    head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": request["model"]}
    with chat.naming_origins():
        stream = call.caller.chat_stream(
            chat.messages, request_id=request_id, timeout_s=call.timeout_s, **model, **options
        )
        async with stream:
            if request.get("stream"):
                await _Events(call, head).send(stream)
            else:
                whole = call.finished(await stream.result())
                await call.exchange.answer(
                    head | {"content": _content(whole)} | _end(whole) | {"usage": usage_of(whole.usage)}
                )


async def count_tokens(call: HttpCall) -> None:
    """Answer with the number of tokens of a conversation. Raises HttpError, LoraplexError."""
    request = await call.read(COUNT)
    options, chat = options_of(request), conversation(request)
    options.pop("response_format", None)  # not in the prompt
    model = await call.named(request["model"])
    with chat.naming_origins():
        count = await call.caller.count_tokens(messages=chat.messages, **model, **options)
    await call.exchange.answer({"input_tokens": count})


def _content(whole: Generation) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if whole.reasoning:
        blocks.append({"type": "thinking", "thinking": whole.reasoning, "signature": ""})
    if whole.text:
        blocks.append({"type": "text", "text": whole.text})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)}
        for call in whole.tool_calls
    ]
    return blocks


def _object(arguments: str) -> Any:
    """Return arguments as an object: of those that are cut as much as there is, as Anthropic's clients read them."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _end(whole: Generation) -> dict[str, Any]:
    stop = whole.stop if isinstance(whole.stop, str) else None
    end: dict[str, Any] = {"stop_reason": REASONS[whole.finish_reason], "stop_sequence": stop}
    if whole.finish_reason is FinishReason.CONTENT_FILTER:
        end["stop_details"] = {"type": "refusal", "category": None, "explanation": whole.choices[0].refusal or None}
    return end


class _Events:
    """A stream of events, made of a stream of pieces: blocks of thinking, text and calls, one after the other."""

    def __init__(self, call: HttpCall, head: Mapping[str, Any]) -> None:
        self._call = call
        self._head = head
        # The number of the open block, -1 before the first, and what it holds: a kind, or the index of a call.
        self._index = -1
        self._open: str | int | None = None

    async def send(self, stream: AsyncGenerationStream) -> None:
        """Send the whole stream. Raises LoraplexError."""
        exchange = self._call.exchange
        await self._call.begin_when_admitted([stream], self._start())
        async for piece in stream:
            if not exchange.status:
                await self._call.begin(self._start())
            if piece.finished is not None:
                await exchange.end(self._last(self._call.finished(piece.finished)))
            elif events := self._events(piece):
                await exchange.write(events)

    def _start(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}  # known at the end
        end = {"stop_reason": None, "stop_sequence": None}
        return event("message_start", message={**self._head, "content": [], **end, "usage": usage})

    def _events(self, piece: Piece) -> bytes:
        # A message may end a call, go on with text, and begin another call.
        begun = [part for part in piece.tool_calls if part.index != self._open]
        events = self._calls([part for part in piece.tool_calls if part.index == self._open])
        if piece.reasoning:
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            events += self._delta("thinking", empty, {"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            empty = {"type": "text", "text": ""}
            events += self._delta("text", empty, {"type": "text_delta", "text": piece.text})
        return events + self._calls(begun)

    def _calls(self, parts: Sequence[ToolCallPart]) -> bytes:
        events = b""
        for part in parts:
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            events += self._delta(part.index, block, {"type": "input_json_delta", "partial_json": part.arguments})
        return events

    def _delta(self, holds: str | int, block: Mapping[str, Any], delta: Mapping[str, Any]) -> bytes:
        """Return the event of a block's part, behind those that close the former block and open this one."""
        events = b""
        if holds != self._open:
            events = self._close()
            self._open = holds
            self._index += 1
            events += event("content_block_start", index=self._index, content_block=block)
        return events + event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        return b"" if self._open is None else event("content_block_stop", index=self._index)

    def _last(self, whole: Generation) -> bytes:
        end = event("message_delta", delta=_end(whole), usage=usage_of(whole.usage))
        return self._close() + end + event("message_stop")
