"""Requests of LoRAX's and TGI's protocol, which no package declares as types that validate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Required

from loraplex_client.lorax.ask import Ask
from typing_extensions import TypedDict

from clients.gateway.bodies import Body
from clients.gateway.errors import not_served


class Grammar(TypedDict, total=False):
    """The format of an answer in TGI's words."""

    type: Required[Literal["json", "regex"]]
    value: Required[Any]


class ResponseFormat(TypedDict, total=False):
    """The format of an answer in LoRAX's words."""

    type: Required[Literal["json_object"]]
    schema: dict[str, Any] | None


class MergedAdapters(TypedDict, total=False):
    """LoRAX's sum of adapters."""

    ids: Required[list[str]]
    weights: Required[list[float]]
    merge_strategy: str | None
    density: float | None
    majority_sign_method: str | None


class Parameters(TypedDict, total=False):
    """Parameters of both servers."""

    adapter_id: str | None
    adapter_source: str | None
    api_token: str | None
    merged_adapters: MergedAdapters | None
    best_of: int | None
    temperature: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    top_k: int | None
    top_p: float | None
    typical_p: float | None
    do_sample: bool | None
    max_new_tokens: int | None
    ignore_eos_token: bool | None
    return_full_text: bool | None
    stop: list[str] | None
    truncate: int | None
    watermark: bool | None
    details: bool | None
    decoder_input_details: bool | None
    return_k_alternatives: int | None
    top_n_tokens: int | None
    apply_chat_template: bool | None
    seed: int | None
    grammar: Grammar | None
    response_format: ResponseFormat | None


class GenerateRequest(TypedDict, total=False):
    """Body of a request to /generate, /generate_stream and /."""

    inputs: Required[str]
    parameters: Parameters | None
    stream: bool | None


class TokenizeRequest(TypedDict, total=False):
    """Body of a request to /tokenize."""

    inputs: Required[str]
    parameters: Parameters | None
    add_special_tokens: bool | None


GENERATE, TOKENIZE = Body(GenerateRequest), Body(TokenizeRequest)

# TGI's parameters with LoRAX's names.
_RENAMED = {"stop": "stop_sequences", "top_n_tokens": "return_k_alternatives"}


def ask_of(request: Mapping[str, Any]) -> Ask:
    """Return a request as the SDK reads LoRAX's. Raises HttpError, LoraplexError on what is not served."""
    given = {
        _RENAMED.get(name, name): value
        for name, value in (request.get("parameters") or {}).items()
        if value is not None and name not in ("adapter_id", "adapter_source", "grammar", "apply_chat_template")
    }
    parameters = request.get("parameters") or {}
    if parameters.get("apply_chat_template"):
        raise not_served("apply_chat_template", "is not served; send the chat to /v1/chat/completions")
    grammar = parameters.get("grammar")
    if grammar is not None and grammar["type"] == "json":
        given["response_format"] = {"type": "json_object", "schema": grammar["value"]}
    given["details"] = True  # the answer has them where the request asks for them
    ask = Ask(
        request["inputs"],
        parameters.get("adapter_id"),
        parameters.get("adapter_source"),
        given,  # type: ignore[arg-type]
    )
    if grammar is not None and grammar["type"] == "regex":
        ask.options["regex"] = grammar["value"]
    return ask
