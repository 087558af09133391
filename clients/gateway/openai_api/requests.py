"""Requests of OpenAI's protocol: their fields, and the options of the SDK that these are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai.types import EmbeddingCreateParams
from openai.types.chat import ChatCompletionAssistantMessageParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from typing_extensions import TypedDict

from clients.gateway.bodies import Body
from clients.gateway.errors import check_served, invalid, not_served

# Tokens of a completion without `max_tokens`, and the temperature without one: OpenAI's own.
_COMPLETION_TOKENS = 16
_TEMPERATURE = 1.0


class Extensions(TypedDict, total=False):
    """Fields beyond OpenAI's, with vLLM's names; openai sends them as `extra_body`."""

    top_k: int | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    min_tokens: int | None
    stop_token_ids: list[int] | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    priority: int | None


class ChatRequest(ChatParams, Extensions, total=False):
    """Body of a request to /v1/chat/completions."""

    stream: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


class CompletionRequest(CompletionParams, Extensions, total=False):
    """Body of a request to /v1/completions."""

    stream: bool | None


# `reasoning_content` is in the answers of models that reason, and programs send it back.
CHAT = Body(ChatRequest, {ChatCompletionAssistantMessageParam: ["reasoning_content"]})
COMPLETION = Body(CompletionRequest)
EMBEDDING = Body(EmbeddingCreateParams)

# Fields that are refused, unless their value asks for nothing.
_NOT_SERVED = (
    "audio", "function_call", "functions", "modalities", "moderation", "prediction", "service_tier", "store", "suffix",
    "verbosity", "web_search_options",
)  # fmt: skip
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
# Fields that are the SDK's options of another name.
_RENAMED = {
    "min_tokens": "min_new_tokens",
    "chat_template_kwargs": "template_args",
}
_SAME = (
    "temperature", "top_p", "frequency_penalty", "presence_penalty", "n", "stop", "best_of", "echo", "tools",
    "tool_choice", "parallel_tool_calls", "add_generation_prompt", "continue_final_message",
    *(name for name in Extensions.__annotations__ if name not in _RENAMED),
)  # fmt: skip


def chat_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a chat, without its model. Raises HttpError on a field that is not served."""
    options = _options(request)
    options["max_new_tokens"] = request.get("max_completion_tokens") or request.get("max_tokens")
    if request.get("logprobs"):
        options["logprobs"] = request.get("top_logprobs") or 0
    elif request.get("top_logprobs") is not None:
        raise invalid("top_logprobs", "needs logprobs")
    if (effort := request.get("reasoning_effort")) is not None:
        options["template_args"] = {**(options.get("template_args") or {}), "reasoning_effort": effort}
    _check_tools(request)
    form = request.get("response_format")
    options["response_format"] = None if form is None or form["type"] == "text" else form
    return options


def completion_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a completion, without model and prompt. Raises HttpError on a field that is not served."""
    options = _options(request)
    given = request.get("max_tokens")
    options["max_new_tokens"] = _COMPLETION_TOKENS if given is None else given
    options["logprobs"] = request.get("logprobs")
    if options["logprobs"] is not None and request.get("echo"):
        raise not_served("logprobs", "is not served together with echo")
    return options


def _options(request: Mapping[str, Any]) -> dict[str, Any]:
    check_served(request, _NOT_SERVED, _NOTHING)
    options = {name: request[name] for name in _SAME if request.get(name) is not None}
    options |= {ours: request[name] for name, ours in _RENAMED.items() if request.get(name) is not None}
    options.setdefault("temperature", _TEMPERATURE)
    if (seed := request.get("seed")) is not None:
        options["seed"] = seed % 2**64  # OpenAI's are signed
    if request.get("logit_bias"):
        options["logit_bias"] = _biases(request["logit_bias"])
    return options


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in given.items()}
    except ValueError:
        raise invalid("logit_bias", "each key is a token id") from None


def _check_tools(request: Mapping[str, Any]) -> None:
    for index, tool in enumerate(request.get("tools") or ()):
        if tool["type"] != "function":
            raise not_served(f"tools[{index}].type", f"{tool['type']} is not served, only function")
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice["type"] != "function":
        raise not_served("tool_choice.type", f"{choice['type']} is not served, only function")


def wants_usage(request: Mapping[str, Any]) -> bool:
    """Return whether a stream ends with its token counts."""
    options = request.get("stream_options") or {}
    if options and not request.get("stream"):
        raise invalid("stream_options", "needs stream")
    return bool(options.get("include_usage"))
