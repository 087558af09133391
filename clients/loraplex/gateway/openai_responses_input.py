"""Requests to /v1/responses of OpenAI's protocol: their shapes, the chats that they are, and the turns before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Required

from openai.types.responses.response_create_params import ResponseCreateParamsBase
from typing_extensions import TypedDict

from loraplex.gateway.bodies import Body
from loraplex.gateway.conversation import ChatBuilder
from loraplex.gateway.errors import check_served, invalid, not_served
from loraplex.gateway.openai_api import UNBOUNDED, Extensions, check_tool_choice, common_options, has_format
from loraplex.gateway.openai_messages import LENIENT, Other, Part, text_of

_LOGPROBS = "message.output_text.logprobs"
# Values of `include` that are accepted. Reasoning always comes, and is never encrypted.
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")


class MessageItem(TypedDict, total=False):
    """A message to the model, or one of the model's, as an answer has it or in short."""

    type: Literal["message"]
    role: Required[Literal["user", "system", "developer", "assistant"]]
    content: Required[str | list[Part]]


class FunctionCall(TypedDict, total=False):
    """A call of a function by the model."""

    type: Required[Literal["function_call"]]
    call_id: Required[str]
    name: Required[str]
    arguments: Required[str]


class FunctionResult(TypedDict, total=False):
    """The result of a call."""

    type: Required[Literal["function_call_output"]]
    call_id: Required[str]
    output: str | list[Part]


class Reasoning(TypedDict, total=False):
    """The reasoning before an answer."""

    type: Required[Literal["reasoning"]]
    content: list[Mapping[str, Any]]


Item = MessageItem | FunctionCall | FunctionResult | Reasoning | Other


class FunctionTool(TypedDict, total=False):
    """A function that the client runs."""

    type: Required[Literal["function"]]
    name: Required[str]
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class Namespace(TypedDict, total=False):
    """Functions under a name; Codex sends them."""

    type: Required[Literal["namespace"]]
    name: Required[str]
    description: str | None
    tools: Required[list[FunctionTool]]


Tool = FunctionTool | Namespace | Other
_TOOLS = ("function", "namespace")


class ResponseRequest(ResponseCreateParamsBase, Extensions, total=False):
    """Body of a request to /v1/responses."""

    input: Required[str | list[Item]]  # type: ignore[misc]
    model: Required[str]  # type: ignore[misc]
    tools: list[Tool]  # type: ignore[misc]
    include: list[str] | None  # type: ignore[misc]
    stream: bool | None
    seed: int | None
    client_metadata: Any


RESPONSE = Body(ResponseRequest, [*LENIENT, MessageItem, FunctionCall, FunctionResult, Reasoning])

# Fields that are refused, unless their value asks for nothing.
_NOT_SERVED = (
    "access_programs", "background", "background_options", "context_management", "conversation", "image",
    "max_tool_calls", "moderation", "prompt",
)  # fmt: skip
_NOTHING = {"background": (False,)}


@dataclass(frozen=True)
class ServedTool:
    """A function that the model may call: its place in the request, its namespace or none, and itself."""

    origin: str
    namespace: str
    function: Mapping[str, Any]


def served_tools(request: Mapping[str, Any]) -> list[ServedTool]:
    """Return the functions of a request. Raises HttpError on a tool that OpenAI's servers run.

    Web search is left out where the model may choose among others: Codex offers it in every request.
    """
    tools = request.get("tools") or ()
    is_choice = request.get("tool_choice", "auto") in ("auto", "none") and any(one["type"] in _TOOLS for one in tools)
    served = []
    for index, tool in enumerate(tools):
        if tool["type"] == "namespace":
            inner = enumerate(tool["tools"])
            served += [ServedTool(f"tools[{index}].tools[{at}]", tool["name"], function) for at, function in inner]
        elif tool["type"] == "function":
            served.append(ServedTool(f"tools[{index}]", "", tool))
        elif not (is_choice and tool["type"].startswith("web_search")):
            raise not_served(f"tools[{index}].type", f"{tool['type'][:100]} is not served, only function and namespace")
    return served


def items_of(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the items of a request."""
    given = request["input"]
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else list(given)


def conversation(
    request: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]], items: Sequence[Mapping[str, Any]]
) -> ChatBuilder:
    """Return the chat of a request's items and the turns before it. Raises HttpError on an item that is not served.

    An answer's reasoning, its text and its calls are items of their own, and one message of a chat.
    """
    chat = ChatBuilder(tools=[tool.origin for tool in served_tools(request)])
    if request.get("instructions"):
        chat.add("instructions", role="system", content=request["instructions"])
    places = ["previous_response_id"] * len(earlier) + [f"input[{index}]" for index in range(len(items))]
    for at, item in zip(places, (*earlier, *items), strict=True):
        kind = item.get("type", "message")
        if kind == "function_call_output":
            chat.add(
                at, role="tool", tool_call_id=item["call_id"], content=text_of(f"{at}.output", item.get("output", ""))
            )
        elif kind == "message" and item["role"] != "assistant":
            chat.add(at, role=item["role"], content=text_of(f"{at}.content", item["content"]))
        elif kind == "reasoning":
            thought = "".join(str(part.get("text", "")) for part in item.get("content") or ())
            if thought:
                chat.add(at, role="assistant", content="", reasoning=thought)
        elif kind == "message":
            text = text_of(f"{at}.content", item["content"])
            if (open_answer := _open_answer(chat)) is not None and not open_answer["content"]:
                open_answer["content"] = text
            else:
                chat.add(at, role="assistant", content=text)
        elif kind == "function_call":
            if _open_answer(chat) is None:
                chat.add(at, role="assistant", content="")
            function = {"id": item["call_id"], "name": item["name"], "arguments": item["arguments"]}
            chat.messages[-1].setdefault("tool_calls", []).append(function)
        else:
            raise not_served(f"{at}.type", f"{kind} is not served")
    return chat


def _open_answer(chat: ChatBuilder) -> dict[str, Any] | None:
    """Return the last message if it is an answer that another item may continue."""
    last = chat.messages[-1] if chat.messages else {}
    return last if last.get("role") == "assistant" else None


def options_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a chat, without model and messages. Raises HttpError on a field that is not served."""
    check_served(request, _NOT_SERVED, _NOTHING)
    check_tool_choice(request)
    options = common_options(request)
    if request.get("tools"):
        options["tools"] = [tool.function for tool in served_tools(request)]
    options["max_tokens"] = request.get("max_output_tokens")
    options["default_max_tokens"], options["cap_max_tokens"] = UNBOUNDED, True
    included = request.get("include") or ()
    for index, name in enumerate(included):
        if name not in _INCLUDED:
            raise not_served(f"include[{index}]", f"{name[:100]} is not served, only {' and '.join(_INCLUDED)}")
    if _LOGPROBS in included:
        options["logprobs"] = request.get("top_logprobs") or 0
    elif request.get("top_logprobs"):
        raise invalid("top_logprobs", f"needs {_LOGPROBS} in include")
    if (effort := (request.get("reasoning") or {}).get("effort")) is not None:
        options["template_args"] = {**options.get("template_args", {}), "reasoning_effort": effort}
    form = (request.get("text") or {}).get("format") or {"type": "text"}
    if form["type"] != "text" and has_format(options):
        raise invalid("text.format", "cannot be combined with another format")
    if form["type"] == "json_schema":
        options["response_format"] = {"type": "json_schema", "schema": form["schema"]}
    elif form["type"] != "text":
        options["response_format"] = {"type": form["type"]}
    return options
