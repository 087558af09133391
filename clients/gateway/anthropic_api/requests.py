"""Requests of Anthropic's protocol: their fields, and the options of the SDK that these are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from anthropic.types import ToolParam
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from loraplex_client import InvalidRequestError, LoraplexError, NotImplementedByServerError

from clients.gateway.anthropic_api.conversation import conversation
from clients.gateway.bodies import Body
from clients.gateway.errors import check_served, http_error, not_served

# The temperature of a request without one: Anthropic's own.
_TEMPERATURE = 1.0


class MessagesRequest(MessageCreateParamsBase, total=False):
    """Body of a request to /v1/messages. Older versions of the protocol have the fields of sampling."""

    stream: bool | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    tools: list[ToolParam]  # type: ignore[misc]  # those that Anthropic runs itself are not served


class CountRequest(MessageCountTokensParams, total=False):
    """Body of a request to /v1/messages/count_tokens."""

    tools: list[ToolParam]  # type: ignore[misc]


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
        options["tools"] = [
            {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
            for tool in request["tools"]
        ]
    if (choice := request.get("tool_choice")) is not None:
        options["tool_choice"] = {"name": choice["name"]} if choice["type"] == "tool" else _CHOICES[choice["type"]]
        options["parallel_tool_calls"] = False if choice.get("disable_parallel_tool_use") else None
    output = request.get("output_config") or {}
    if output.get("format"):
        options["response_format"] = {"type": "json_schema", "schema": output["format"]["schema"]}
    if output.get("effort"):
        options["template_args"] = {"reasoning_effort": output["effort"]}
    return options


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
