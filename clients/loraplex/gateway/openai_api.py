"""OpenAI's protocol: its shapes, the options of the SDK that its requests are, models and embeddings."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Required

import msgspec
from openai.types import EmbeddingCreateParams
from openai.types.chat import (
    ChatCompletionAllowedToolChoiceParam,
    ChatCompletionNamedToolChoiceCustomParam,
    ChatCompletionStreamOptionsParam,
)
from openai.types.chat.chat_completion_named_tool_choice_param import Function
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.shared_params import ResponseFormatJSONSchema, ResponseFormatText
from typing_extensions import TypedDict

from loraplex.gateway.bodies import Body
from loraplex.gateway.conversation import SESSION_CHARACTERS
from loraplex.gateway.endpoint import HttpCall, Protocol
from loraplex.gateway.errors import HttpError, check_served, invalid, named_model, not_served, renamed
from loraplex.gateway.exchange import encode, raw
from loraplex.gateway.openai_messages import LENIENT, OpenAIMessage
from loraplex_client import Adapter, FinishReason, Generation, PermissionDeniedError, ServedModel

DONE = b"data: [DONE]\n\n"
REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.END: "stop",
    FinishReason.STOP: "stop",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.CONTENT_FILTER: "content_filter",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# Names of this protocol for the cluster's, which has a tool without the object around its fields.
_NAMES = {
    r"(tools\[\d+\])\.(?=name|description|parameters)": r"\1.function.",
    r"tool_choice\.name": "tool_choice.function.name",
    r"(messages\[\d+\])\.parts": r"\1.content",
    r"inputs(\[\d+\])(\.(text|token_ids))?": r"input\1",
    "json_schema": "response_format.json_schema.schema",
    "template_args": "chat_template_kwargs",
    "truncate_to": "truncate_prompt_tokens",
    "token_ids": "prompt",
    "chat$": "messages",
    "adapter$": "model",
}
# Tokens of a completion without `max_tokens`, and the temperature where neither request nor model has one: OpenAI's.
_COMPLETION_TOKENS = 16
# Seeds are OpenAI's, signed numbers of 64 bits.
SEEDS = 1 << 63
_TEMPERATURE = 1.0
# An answer without `max_tokens` ends with the context.
UNBOUNDED = (1 << 32) - 1
_OWNER = "loraplex"


def event(payload: Mapping[str, Any]) -> bytes:
    """Return a value as an event of a stream."""
    return b"data: " + encode(payload) + b"\n\n"


def error_of(error: HttpError, names: Mapping[str, str] = _NAMES) -> Mapping[str, Any]:
    """Return an error's answer; `names` are those of the request's fields for the cluster's."""
    error = named_model(renamed(error, names))
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    code, message = error.code, error.message
    if error.code == "context_exceeded":
        code = "context_length_exceeded"
        message = f"{message} ({code})"  # client libraries look for it in the message as well
    if error.status == 404 and error.field == "model":
        code = "model_not_found"
    return {"error": {"message": message, "type": kind, "param": error.field or None, "code": code}}


PROTOCOL = Protocol(error_of, lambda error: event(error_of(error)))


def counts_of(wholes: Sequence[Generation]) -> dict[str, Any]:
    """Return the `usage` of answers together, and vLLM's `metrics` of their drafts where any was checked."""
    usages, drafts = [whole.usage for whole in wholes], [whole.speculative_decoding for whole in wholes]
    prompt, completion = sum(each.prompt_tokens for each in usages), sum(each.completion_tokens for each in usages)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in usages)},
    }
    checked = [each for each in drafts if each is not None]
    if not checked:
        return {"usage": usage}
    steps, accepted = sum(each.steps for each in checked), sum(each.accepted_tokens for each in checked)
    drafted = sum(each.draft_tokens for each in checked)
    speculative = {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / drafted,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }
    return {"usage": usage, "metrics": {"speculative_decoding": speculative}}


def head_of(kind: str, prefix: str, request_id: str, model: str) -> dict[str, Any]:
    """Return the fields that an answer and each of its chunks begin with."""
    return {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": model}


class StructuredOutputs(TypedDict, total=False):
    """The format of an answer in vLLM's words."""

    json: str | dict[str, Any] | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None
    json_object: bool | None
    disable_any_whitespace: bool | None


class Extensions(TypedDict, total=False):
    """Fields beyond OpenAI's, with vLLM's names or the SDK's; openai sends them as `extra_body`."""

    top_k: int | None
    min_p: float | None
    typical_p: float | None
    top_n_sigma: float | None
    repetition_penalty: float | None
    min_tokens: int | None
    stop_token_ids: list[int] | None
    allowed_token_ids: list[int] | None
    bad_words: list[str] | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    priority: int | None
    allow_inactive: bool | None
    json_style: str | list[str] | None
    speculation: str | None
    include_stop_str_in_output: bool | None
    structured_outputs: StructuredOutputs | None
    guided_json: str | dict[str, Any] | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    guided_decoding_backend: str | None
    use_beam_search: bool | None
    chat_template_kwargs: dict[str, Any] | None
    enable_thinking: bool | None


class CompletionExtensions(Extensions, total=False):
    """Fields beyond OpenAI's of requests whose answers are choices."""

    logit_bias: dict[str, float] | None
    prompt_logprobs: int | None
    return_tokens_as_token_ids: bool | None
    return_token_ids: bool | None
    logprobs_mode: str | None


class StreamOptions(ChatCompletionStreamOptionsParam, total=False):
    """Options of a stream; `continuous_usage_stats` is vLLM's."""

    continuous_usage_stats: bool | None


class NamedFunction(TypedDict, total=False):
    """The choice of a function; TGI's clients leave out the type."""

    type: Literal["function"]
    function: Required[Function]


class JsonFormat(TypedDict, total=False):
    """The format of an answer that is JSON; clients of TGI send a schema as its value, those of LoRAX as `schema`."""

    type: Required[Literal["json_object", "json"]]
    value: dict[str, Any] | None
    schema: dict[str, Any] | None


class ChatRequest(ChatParams, CompletionExtensions, total=False):  # type: ignore[misc]
    """Body of a request to /v1/chat/completions."""

    messages: Required[list[OpenAIMessage]]  # type: ignore[misc]
    stream: bool | None
    stream_options: StreamOptions | None  # type: ignore[misc]
    tool_choice: (  # type: ignore[misc]
        Literal["none", "auto", "required"]
        | ChatCompletionAllowedToolChoiceParam
        | NamedFunction
        | ChatCompletionNamedToolChoiceCustomParam
    )
    response_format: ResponseFormatText | ResponseFormatJSONSchema | JsonFormat  # type: ignore[misc]
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    include_reasoning: bool | None
    thinking_token_budget: int | None
    echo: bool | None


class CompletionRequest(CompletionParams, CompletionExtensions, total=False):  # type: ignore[misc]
    """Body of a request to /v1/completions."""

    stream: bool | None
    stream_options: StreamOptions | None  # type: ignore[misc]


CHAT = Body(ChatRequest, LENIENT)
COMPLETION = Body(CompletionRequest)
EMBEDDING = Body(EmbeddingCreateParams)

# Fields that are refused, unless their value asks for nothing.
_NOT_SERVED = (
    "audio", "function_call", "functions", "modalities", "moderation", "prediction", "suffix",
    "use_beam_search", "verbosity", "web_search_options",
)  # fmt: skip
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "use_beam_search": (False,),
}
# vLLM's fields that are the SDK's options of another name, and those of formats, which are also in
# `structured_outputs`.
_RENAMED = {"include_stop_str_in_output": "keep_stop"}
# Expression for the cluster's fields of formats.
FORMATS = r"(json_schema|regex|choices(\.values)?|grammar)\b"
_GUIDED = {"json": "response_format", "regex": "regex", "choice": "choices", "grammar": "grammar"}
_SAME = (
    "temperature", "top_p", "frequency_penalty", "presence_penalty", "n", "stop", "best_of", "echo", "tools",
    "tool_choice", "parallel_tool_calls", "add_generation_prompt", "continue_final_message",
    "top_k", "min_p", "typical_p", "top_n_sigma", "repetition_penalty", "min_tokens", "stop_token_ids",
    "allowed_token_ids", "bad_words", "ignore_eos", "skip_special_tokens", "add_special_tokens",
    "truncate_prompt_tokens", "priority", "allow_inactive", "json_style", "speculation", "logprobs_mode",
    "thinking_token_budget",
)  # fmt: skip


def chat_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a chat, without its model. Raises HttpError on a field that is not served."""
    check_served(request, (*_NOT_SERVED, "echo"), {**_NOTHING, "echo": (False,)})
    options = common_options(request)
    limit = request.get("max_completion_tokens")
    options["max_tokens"] = request.get("max_tokens") if limit is None else limit
    options["default_max_tokens"] = UNBOUNDED
    if request.get("logprobs"):
        options["logprobs"] = request.get("top_logprobs") or 0
    elif request.get("top_logprobs"):
        raise invalid("top_logprobs", "needs logprobs")
    if (effort := request.get("reasoning_effort")) is not None:
        options["template_args"] = {**(options.get("template_args") or {}), "reasoning_effort": effort}
    for index, tool in enumerate(request.get("tools") or ()):
        if tool["type"] != "function":
            raise not_served(f"tools[{index}].type", f"{tool['type']} is not served, only function")
    check_tool_choice(request)
    if (form := _format(request.get("response_format"))) is not None:
        if has_format(options):
            raise invalid("response_format", "cannot be combined with another format")
        options["response_format"] = form
    return options


def _format(form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a format as the SDK has it; None for any text."""
    if form is None or form["type"] == "text":
        return None
    if form["type"] == "json_schema":
        return form
    schema = form.get("schema") or form.get("value")
    return {"type": "json_object"} if schema is None else {"type": "json_schema", "schema": schema}


def completion_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a completion, without model and prompt. Raises HttpError on a field that is not served."""
    check_served(request, _NOT_SERVED, _NOTHING)
    options = common_options(request)
    limit = request.get("max_tokens")
    options["max_tokens"] = _COMPLETION_TOKENS if limit is None else limit
    options["logprobs"] = request.get("logprobs")
    if options["logprobs"] is not None and request.get("echo"):
        for name, where in (("stream", "in a stream"), ("truncate_prompt_tokens", "and truncate_prompt_tokens")):
            if request.get(name):
                raise not_served("logprobs", f"is not served together with echo {where}")
        options.setdefault("prompt_logprobs", options["logprobs"])
    return options


def common_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options whose fields have the same names in all of the protocol's requests. Raises HttpError."""
    options = {name: request[name] for name in _SAME if request.get(name) is not None}
    options |= {ours: request[name] for name, ours in _RENAMED.items() if request.get(name) is not None}
    options |= _guided(request)
    options["default_temperature"], options["cap_max_tokens"] = _TEMPERATURE, True
    if options.get("top_k") == -1:  # vLLM's word for no limit
        options["top_k"] = 0
    if (seed := request.get("seed")) not in (None, -1):  # -1 is vLLM's word for none
        options["seed"] = _seed(seed)
    if request.get("prompt_logprobs") is not None:
        if request.get("stream"):
            raise not_served("prompt_logprobs", "is not served in a stream")
        options["prompt_logprobs"] = request["prompt_logprobs"]
    variables = dict(request.get("chat_template_kwargs") or {})
    if (thinks := request.get("enable_thinking")) is not None:
        variables.setdefault("enable_thinking", thinks)
    if variables:
        options["template_args"] = variables
    if session := request.get("prompt_cache_key") or request.get("user"):
        options["session_id"] = session[:SESSION_CHARACTERS]
    if request.get("logit_bias"):
        options["logit_bias"] = _biases(request["logit_bias"])
    return options


def _seed(seed: int) -> int:
    if not -SEEDS <= seed < SEEDS:
        raise invalid("seed", f"{seed} is not between -2^63 and 2^63 - 1")
    return seed % 2**64


def shows_ids(request: Mapping[str, Any]) -> bool:
    """Return whether the ids of prompts and answers are asked for. Raises HttpError where they are not served."""
    if not request.get("return_token_ids"):
        return False
    for name, where in (("stream", "in a stream"), ("truncate_prompt_tokens", "with truncate_prompt_tokens")):
        if request.get(name):
            raise not_served("return_token_ids", f"is not served {where}")
    return True


def has_format(options: Mapping[str, Any]) -> bool:
    """Return whether options of the SDK have a format in vLLM's words."""
    return not options.keys().isdisjoint(_GUIDED.values())


def format_names(request: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the names of a request's format, where they are not those of OpenAI's protocol, for the cluster's."""
    form = request.get("response_format") or {}
    place = next((place for place, _, _ in _guided_places(request)), "")
    if form.get("type") in ("json_object", "json"):
        place = next((f"response_format.{name}" for name in ("schema", "value") if form.get(name)), "")
    return {FORMATS: place} if place else {}


def _guided_places(request: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    inside = request.get("structured_outputs") or {}
    places = [(f"guided_{name}", name, request.get(f"guided_{name}")) for name in _GUIDED]
    places += [(f"structured_outputs.{name}", name, inside.get(name)) for name in (*_GUIDED, "json_object")]
    return [place for place in places if place[2] not in (None, False)]


def _guided(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format that a request has in vLLM's words, as an option of the SDK. Raises HttpError."""
    inside, given = request.get("structured_outputs") or {}, _guided_places(request)
    if len(given) > 1:
        raise invalid(given[1][0], f"cannot be combined with {given[0][0]}")
    if not given:
        return {}
    _, name, value = given[0]
    found = {"response_format": {"type": "json_object"}} if name == "json_object" else {_GUIDED[name]: value}
    compact = inside.get("disable_any_whitespace") and "response_format" in found and request.get("json_style") is None
    return found | {"json_style": "compact"} if compact else found


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in biases.items()}
    except ValueError:
        raise invalid("logit_bias", "each key is a token id") from None


def check_tool_choice(request: Mapping[str, Any]) -> None:
    """Raise HttpError on the choice of a tool that is not a function of the client's."""
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type", "function") != "function":
        raise not_served("tool_choice.type", f"{choice['type']} is not served, only function")


@dataclass(frozen=True)
class StreamUsage:
    """The chunks of a stream that have token counts: one after the last choice's end, or `every` chunk, as vLLM's."""

    last: bool
    every: bool


def stream_usage(request: Mapping[str, Any]) -> StreamUsage:
    """Return which chunks of a stream have token counts. Raises HttpError."""
    options = request.get("stream_options") or {}
    if options and not request.get("stream"):
        raise invalid("stream_options", "needs stream")
    last = bool(options.get("include_usage"))
    return StreamUsage(last, every=last and bool(options.get("continuous_usage_stats")))


async def list_models(call: HttpCall) -> None:
    """Answer with all names that `model` may have. Raises LoraplexError."""
    await call.exchange.answer({"object": "list", "data": await _models(call)})


async def get_model(call: HttpCall) -> None:
    """Answer with one of them. Raises HttpError, LoraplexError."""
    name = call.parameters["model"]
    entry = next((model for model in await _models(call) if model["id"] == name), None)
    if entry is None:
        raise HttpError(404, "model_not_found", f"no model {name[:200]}", "model")
    await call.exchange.answer(entry)


async def _models(call: HttpCall) -> list[dict[str, Any]]:
    bases = await call.cluster.models(call.caller)
    entries = [_base(model) for model in bases]
    if call.cluster.has_store:
        served = {model.name: model.context_length for model in bases}
        adapters = []
        with suppress(PermissionDeniedError):  # a key of the scope generate, which may name adapters, not list them
            usable = await call.caller.store.list(usable=True)
            adapters = [adapter for adapter in usable if adapter.base_model in served]
        # A tenant's own adapter hides a shared one of the same name.
        named = [_adapter(adapter, served[adapter.base_model]) for adapter in sorted(adapters, key=_is_own)]
        entries += {model["id"]: model for model in named}.values()
    return entries


def _is_own(adapter: Adapter) -> bool:
    return not adapter.name.startswith("tenants/shared/")


def _base(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": _OWNER,
        "max_model_len": model.context_length,
        "parent": None,
    }


def _adapter(adapter: Adapter, context_length: int) -> dict[str, Any]:
    _, tenant, _, name = adapter.name.split("/", 3)
    return {
        "id": name,
        "object": "model",
        "created": int(adapter.create_time.timestamp()),
        "owned_by": tenant,
        "root": adapter.name,
        "max_model_len": context_length,
        "parent": adapter.base_model,
        "aliases": dict(adapter.aliases),
    }


async def embeddings(call: HttpCall) -> None:
    """Answer with a vector of each text. Raises HttpError, LoraplexError."""
    request = await call.read(EMBEDDING)
    if request.get("dimensions") is not None:
        raise not_served("dimensions")
    texts = _texts(request["input"])
    named = await call.named(request["model"])
    answer = call.finished(await call.caller.embed(texts, timeout_s=call.timeout_s, **named))
    as_text = request.get("encoding_format") == "base64"
    tokens = answer.usage.prompt_tokens

    def told() -> list[msgspec.Raw]:
        return [
            raw({"object": "embedding", "index": index, "embedding": _encoded(vector) if as_text else vector})
            for index, vector in enumerate(answer.vectors)
        ]

    data = await call.run(sum(map(len, answer.vectors)), told)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    await call.exchange.answer({"object": "list", "data": data, "model": request["model"], "usage": usage})


def _texts(value: Any) -> list[Any]:
    """Return each text, or its ids. Raises HttpError."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise invalid("input", "is empty")
    return [value] if isinstance(value[0], int) else list(value)


def _encoded(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
