"""Requests of Anthropic's protocol: their fields, and the options of the SDK that these are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from anthropic.types import ToolParam
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from loraplex_client import InvalidRequestError, LoraplexError, NotImplementedByServerError
from pydantic import ConfigDict, Discriminator, Tag, with_config
from typing_extensions import TypedDict

from clients.gateway.anthropic_api.conversation import conversation
from clients.gateway.bodies import Body
from clients.gateway.errors import check_served, http_error, not_served

# The temperature of a request without one: Anthropic's own.
_TEMPERATURE = 1.0


# Type of the tools whose calls the client runs, which they need not have.
_CUSTOM = "custom"


@with_config(ConfigDict(extra="allow"))
class HostedTool(TypedDict):
    """A tool that Anthropic's servers run; it is read so that the error can name it."""

    type: str


def _kind(tool: Any) -> str:
    """Return the name of a tool's branch in the union."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "Hosted" if isinstance(kind, str) and kind != _CUSTOM else "Custom"


Tool = Annotated[Annotated[ToolParam, Tag("Custom")] | Annotated[HostedTool, Tag("Hosted")], Discriminator(_kind)]


class MessagesRequest(MessageCreateParamsBase, total=False):
    """Body of a request to /v1/messages. Older versions of the protocol have the fields of sampling."""

    stream: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    tools: list[Tool]  # type: ignore[misc]


class CountRequest(MessageCountTokensParams, total=False):
    """Body of a request to /v1/messages/count_tokens."""

    tools: list[Tool]  # type: ignore[misc]


MESSAGES, COUNT = Body(MessagesRequest), Body(CountRequest)

# Fields that are refused, unless their value asks for nothing.
_NOT_SERVED = ("container", "diagnostics", "inference_geo", "service_tier", "speed", "user_profile_id", "workspace_id")
_NOTHING = {"service_tier": ("auto", "standard_only"), "speed": ("standard",)}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def options_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the SDK, `messages` among them. Raises HttpError on a field that is not served."""
    check_served(request, _NOT_SERVED, _NOTHING)
    if (request.get("thinking") or {}).get("type", "disabled") != "disabled":
        raise not_served("thinking", "is the model's own choice here; only `disabled` is taken, without effect")
    options: dict[str, Any] = {
        "messages": conversation(request).messages,
        "temperature": request.get("temperature", _TEMPERATURE),
        "top_p": request.get("top_p"),
        "top_k": request.get("top_k"),
        "max_new_tokens": request.get("max_tokens"),
        "stop": request.get("stop_sequences"),
    }
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
    if output.get("effort"):
        options["template_args"] = {"reasoning_effort": output["effort"]}
    return options


def _tool(at: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the SDK's words. Raises HttpError."""
    if (kind := tool.get("type") or _CUSTOM) != _CUSTOM:
        raise not_served(f"{at}.type", f"{kind} is run by Anthropic's servers; tools with an input_schema are served")
    return {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}


@contextmanager
def named(request: Mapping[str, Any]) -> Iterator[None]:
    """Let an error of the cluster name fields by their places in the request. Raises HttpError, LoraplexError."""
    try:
        yield
    except (InvalidRequestError, NotImplementedByServerError) as error:
        raise _renamed(error, request) from error


def _renamed(error: LoraplexError, request: Mapping[str, Any]) -> Exception:
    failure = http_error(error)
    place, dot, rest = failure.field.partition("]")
    if dot and place.startswith("messages[") and place[9:].isdecimal():
        origin = conversation(request).origins[int(place[9:])]
        failure.message = failure.message.replace(f"{place}]", origin, 1)
        failure.field = origin + rest
    return failure
