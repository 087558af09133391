"""LoRAX's and TGI's protocol: answers to prompts, tokens, what is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Literal, Required

import msgspec
from typing_extensions import TypedDict

from loraplex.gateway.bodies import Body
from loraplex.gateway.endpoint import HttpCall, Protocol
from loraplex.gateway.errors import HttpError, invalid, not_served, renamed
from loraplex.gateway.exchange import encode, raw
from loraplex.gateway.openai_api import FORMATS
from loraplex.gateway.openai_messages import LENIENT, OpenAIMessage, sdk_messages
from loraplex_client.lorax.ask import Ask
from loraplex_client.lorax.types import AlternativeToken, StreamDetails, StreamResponse, Token

# Names of this protocol for the cluster's.
_NAMES = {
    "adapters": "merged_adapters",
    r"adapter\b": "adapter_id",
    "ignore_eos": "ignore_eos_token",
    "max_tokens": "max_new_tokens",
    r"prompt\b": "inputs",
    "truncate_(prompt_tokens|to)": "truncate",
    "logprobs": "top_n_tokens",
    "token_ids": "tokens",
}
_TYPES = {422: "validation", 429: "overloaded", 503: "overloaded"}
# Maximum of answers, and of stop strings, that routers take in a request.
_BEST_OF = _STOPS = 16


def event(payload: Any) -> bytes:
    """Return a value as an event of a stream."""
    return b"data:" + encode(payload) + b"\n\n"


def error_of(error: HttpError) -> Mapping[str, Any]:
    """Return an error's answer."""
    error = renamed(error, _NAMES)
    status = _STATUSES.get(error.status, error.status)
    return {"error": error.message, "error_type": _TYPES.get(status, error.code if status < 500 else "generation")}


# A wrong field is 422 in this protocol.
_STATUSES = {400: 422}
PROTOCOL = Protocol(error_of, lambda error: event(error_of(error)), _STATUSES)


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
    """Body of a request to /tokenize: `inputs`, or vLLM's `prompt`, or `messages` with what they are rendered with."""

    inputs: str
    parameters: Parameters | None
    add_special_tokens: bool | None
    model: str | None
    prompt: str
    messages: list[OpenAIMessage]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    return_token_strs: bool | None


class DetokenizeRequest(TypedDict, total=False):
    """Body of a request to /detokenize, which is vLLM's."""

    model: str | None
    tokens: Required[list[int]]


GENERATE, TOKENIZE, DETOKENIZE = Body(GenerateRequest), Body(TokenizeRequest, LENIENT), Body(DetokenizeRequest)

# TGI's parameters with LoRAX's names.
_RENAMED = {"stop": "stop_sequences", "top_n_tokens": "return_k_alternatives"}


def ask_of(request: Mapping[str, Any]) -> Ask:
    """Return a request as the SDK reads LoRAX's. Raises HttpError, LoraplexError on what is not served."""
    arguments = {
        _RENAMED.get(name, name): value
        for name, value in (request.get("parameters") or {}).items()
        if value is not None and name not in ("adapter_id", "adapter_source", "grammar", "apply_chat_template")
    }
    parameters = request.get("parameters") or {}
    if parameters.get("apply_chat_template"):
        raise not_served("apply_chat_template", "is not served; send the chat to /v1/chat/completions")
    grammar = parameters.get("grammar")
    if grammar is not None and grammar["type"] == "json":
        arguments["response_format"] = {"type": "json_object", "schema": grammar["value"]}
    arguments["details"] = True  # the answer has them where the request asks for them
    ask = Ask(
        request["inputs"],
        parameters.get("adapter_id"),
        parameters.get("adapter_source"),
        arguments,  # type: ignore[arg-type]
    )
    if grammar is not None and grammar["type"] == "regex":
        ask.options["regex"] = grammar["value"]
    return ask


async def generate(call: HttpCall) -> None:
    """Answer a prompt. Raises HttpError, LoraplexError."""
    request = await call.read(GENERATE)
    await call.exchange.answer(await _whole(call, request))


async def generate_stream(call: HttpCall) -> None:
    """Answer a prompt token by token. Raises HttpError, LoraplexError."""
    await _stream(call, await call.read(GENERATE))


async def generate_either(call: HttpCall) -> None:
    """Answer a prompt as the request's `stream` says; a whole answer is in a list. Raises HttpError, LoraplexError."""
    request = await call.read(GENERATE)
    if request.get("stream"):
        await _stream(call, request)
    else:
        await call.exchange.answer([await _whole(call, request)])


async def _whole(call: HttpCall, request: Mapping[str, Any]) -> dict[str, Any]:
    ask = ask_of(request)
    responses: list[StreamResponse] = []
    async with _opened(call, request, ask) as stream:
        async for piece in stream:
            if piece.finished is not None:
                call.finished(piece.finished)
            responses += ask.take(piece)
    whole = ask.whole(responses)
    if not (request.get("parameters") or {}).get("details"):
        return {"generated_text": whole.generated_text}
    assert whole.details is not None, "it was asked for"
    tokens = await _tokens(call, whole.details.tokens)
    details = {**_details(whole.details), "prefill": [], "tokens": tokens, "top_tokens": _tops(tokens)}
    return {"generated_text": whole.generated_text, "details": details}


async def _stream(call: HttpCall, request: Mapping[str, Any]) -> None:
    ask, exchange, index = ask_of(request), call.exchange, 0
    async with _opened(call, request, ask) as stream:
        await call.begin_when_admitted([stream])
        async for piece in stream:
            if not exchange.status:
                await call.begin()
            if piece.finished is not None:
                call.finished(piece.finished)
            events = b""
            for response in ask.take(piece):
                index += 1
                events += event(await _event(call, index, response))
            if events:
                await exchange.write(events)
    await exchange.end()


def _opened(call: HttpCall, request: Mapping[str, Any], ask: Ask) -> Any:
    grammar = (request.get("parameters") or {}).get("grammar")
    call.exchange.names = {FORMATS: "grammar.value" if grammar else "response_format.schema"}
    return call.caller.generate_stream(
        request["inputs"], response_format=ask.format, timeout_s=call.timeout_s, **ask.options
    )


async def _event(call: HttpCall, index: int, response: StreamResponse) -> dict[str, Any]:
    (token,) = await _tokens(call, [response.token])
    return {
        "index": index,
        "token": token,
        "top_tokens": token["alternative_tokens"] or [],
        "generated_text": response.generated_text,
        "details": None if response.details is None else _details(response.details),
    }


async def _tokens(call: HttpCall, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Return tokens; the texts of their alternatives are asked for, all at once."""
    size = sum(1 + len(token.alternative_tokens or ()) for token in tokens)
    others = await call.run(size, lambda: {other.id for token in tokens for other in token.alternative_tokens or ()})
    texts = await call.cluster.token_bytes(call.caller, "", others) if others else {}

    def alternative(other: AlternativeToken) -> dict[str, Any]:
        return {**vars(other), "text": texts[other.id].decode(errors="replace"), "special": False}

    def told() -> list[dict[str, Any]]:
        alternatives = (
            token.alternative_tokens and raw([*map(alternative, token.alternative_tokens)]) for token in tokens
        )
        return [{**vars(token), "alternative_tokens": made} for token, made in zip(tokens, alternatives, strict=True)]

    return await call.run(size, told)


def _tops(tokens: list[dict[str, Any]]) -> list[Any] | None:
    """Return the likeliest tokens at each place in TGI's shape; None where they were not asked for."""
    return (
        [token["alternative_tokens"] or [] for token in tokens] if tokens and tokens[0]["alternative_tokens"] else None
    )


def _details(details: StreamDetails) -> dict[str, Any]:
    """Return the figures of an answer; LoRAX and TGI have two names for the prompt's length."""
    return {
        "finish_reason": details.finish_reason,
        "prompt_tokens": details.prompt_tokens,
        "input_length": details.prompt_tokens,
        "generated_tokens": details.generated_tokens,
        "seed": details.seed,
    }


async def info(call: HttpCall) -> None:
    """Answer with what is served. Raises HttpError, LoraplexError."""
    models = await call.cluster.models(call.caller)
    if not models:
        raise _no_model()
    first = models[0]
    await call.exchange.answer(
        {
            "model_id": first.name,
            "model_sha": first.digest,
            "max_best_of": _BEST_OF,
            "max_stop_sequences": _STOPS,
            "max_input_length": first.context_length - 1,
            "max_input_tokens": first.context_length - 1,
            "max_total_tokens": first.context_length,
            "router": "loraplex",
            "version": version("loraplex"),
        }
    )


async def tokenizer_info(call: HttpCall) -> None:
    """Answer with the first base model's tokenizer_config.json and chat template. Raises HttpError, LoraplexError."""
    models = await call.caller.models(tokenizer_config=True)
    if not models:
        raise _no_model()
    await call.exchange.answer(msgspec.Raw((models[0].tokenizer_config or "{}").encode()))


def _no_model() -> HttpError:
    return HttpError(503, "not_serving", "no base model is registered", retry_after_s=1.0)


# Fields of /tokenize that have the text.
_PROMPTS = ("inputs", "prompt", "messages")


async def _count(call: HttpCall, request: Mapping[str, Any]) -> None:
    """Answer with the ids of a prompt or chat in vLLM's shape. Raises HttpError, LoraplexError."""
    named = await _model(call, request)
    ids = await call.caller.tokenize(
        request.get("prompt"),
        messages=sdk_messages(request["messages"]) if "messages" in request else None,
        add_special_tokens=request.get("add_special_tokens"),
        chat_options={
            "tools": request.get("tools"),
            "add_generation_prompt": request.get("add_generation_prompt"),
            "continue_final_message": request.get("continue_final_message"),
            "template_args": request.get("chat_template_kwargs"),
        },
        **named,
    )
    models = await call.cluster.models(call.caller)
    base = named.get("model") or models[0].name
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": next((model.context_length for model in models if model.name == base), None),
        "tokens": ids,
        "token_strs": None,
    }
    if request.get("return_token_strs"):
        texts = await call.cluster.token_bytes(call.caller, named.get("model", ""), ids)
        decoded = {token_id: own.decode(errors="replace") for token_id, own in texts.items()}
        answer["token_strs"] = list(map(decoded.__getitem__, ids))
    await call.exchange.answer(answer)


async def _model(call: HttpCall, request: Mapping[str, Any]) -> Mapping[str, Any]:
    return await call.cluster.named(call.caller, request["model"]) if request.get("model") else {}


async def detokenize(call: HttpCall) -> None:
    """Answer with the text of ids. Raises HttpError, LoraplexError."""
    request = await call.read(DETOKENIZE)
    model = (await _model(call, request)).get("model", "")
    await call.exchange.answer({"prompt": await call.caller.detokenize(request["tokens"], model=model)})


async def tokenize(call: HttpCall) -> None:
    """Answer with the tokens of a prompt, each with its place in it. Raises HttpError, LoraplexError."""
    request = await call.read(TOKENIZE)
    if len(request.keys() & _PROMPTS) != 1:
        raise invalid("inputs", f"give one of {', '.join(_PROMPTS)}")
    if "inputs" not in request:
        await _count(call, request)
        return
    text = request["inputs"]
    adapter = (request.get("parameters") or {}).get("adapter_id")
    add = request.get("add_special_tokens")
    ids = await call.caller.tokenize(text, adapter_id=adapter, add_special_tokens=add)
    token_bytes = await call.cluster.token_bytes(call.caller, "", ids)

    def told() -> list[msgspec.Raw]:
        data, begin, at, tokens = text.encode(), 0, 0, []
        for token_id in ids:
            own, start = token_bytes[token_id], at
            if data.startswith(own, begin):  # others, such as a beginning of sequence, are not in the text
                begin += len(own)
                at += sum(byte & 0xC0 != 0x80 for byte in own)  # characters that begin in the token
            tokens.append(raw({"id": token_id, "text": own.decode(errors="replace"), "start": start, "stop": at}))
        return tokens

    await call.exchange.answer(await call.run(len(ids), told))
