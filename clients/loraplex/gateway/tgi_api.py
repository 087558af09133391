"""LoRAX's and TGI's protocol: answers to prompts, tokens, what is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from loraplex_client import AsyncGenerationStream, FinishReason, Generation, Piece, TokenLogprobs

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

# Parameters that the SDK's options have under the same names.
_SAME = ("best_of", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed")
# Values of `adapter_source`, none of which has an effect.
_SOURCES = ("hub", "local", "s3", "pbase")
# Tokens of an answer without `max_new_tokens`: LoRAX's.
_ANSWER_TOKENS = 20
_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.END: "eos_token",
    FinishReason.STOP: "stop_sequence",
    FinishReason.TOOL_CALLS: "eos_token",
    FinishReason.CONTENT_FILTER: "stop_sequence",
}


def options_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the SDK's options for a request's parameters. Raises HttpError on what is not served."""
    if parameters.get("apply_chat_template"):
        raise not_served("apply_chat_template", "is not served; send the chat to /v1/chat/completions")
    if (source := parameters.get("adapter_source", _SOURCES[0])) not in _SOURCES:
        raise invalid("adapter_source", f"{source!r} is not one of {', '.join(_SOURCES)}")
    for name in ("watermark", "decoder_input_details"):
        if parameters.get(name):
            raise invalid(name, "not served")
    options: dict[str, Any] = {name: parameters[name] for name in _SAME if name in parameters}
    options |= {
        "adapter_id": parameters.get("adapter_id"),
        "max_tokens": parameters.get("max_new_tokens", _ANSWER_TOKENS),
        "stop": parameters.get("stop", []),
        "ignore_eos": parameters.get("ignore_eos_token"),
        "logprobs": parameters.get("return_k_alternatives", parameters.get("top_n_tokens", 0)),
        "response_format": parameters.get("response_format"),
    }
    if "truncate" in parameters:
        if parameters["truncate"] < 1:  # 0 means to routers: to what the context leaves
            raise invalid("truncate", "must be at least 1")
        options["truncate_prompt_tokens"] = parameters["truncate"]
    if "merged_adapters" in parameters:
        options["adapters"] = _merged(parameters)
    # A request samples if it says so, or gives a value that shapes sampling.
    shapes = {name: parameters[name] for name in ("top_k", "top_p", "typical_p") if name in parameters}
    temperature = parameters.get("temperature", 1.0)
    drawn = parameters.get("do_sample") or shapes or temperature != 1.0
    options |= {"temperature": temperature, **shapes} if drawn else {"temperature": 0.0}
    grammar = parameters.get("grammar", {})
    if grammar.get("type") == "json":
        options["response_format"] = {"type": "json_object", "schema": grammar["value"]}
    elif grammar:
        options["regex"] = grammar["value"]
    return options


def _merged(parameters: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return a weighted set. Raises HttpError on a strategy that is not a sum."""
    merged = parameters["merged_adapters"]
    if "adapter_id" in parameters:
        raise invalid("merged_adapters", "give either this or adapter_id")
    # `density` and `majority_sign_method` are of other strategies; LoRAX's own client sends a density always.
    if (strategy := merged.get("merge_strategy") or "linear") != "linear":
        raise invalid("merged_adapters.merge_strategy", f"{strategy!r} is not served, only 'linear'")
    try:
        return list(zip(merged["ids"], merged["weights"], strict=True))
    except ValueError as error:
        raise invalid("merged_adapters", f"each of ids needs one of weights: {error}") from error


@dataclass(frozen=True)
class Token:
    """A token of an answer; `special`: not part of its text. The id of a stop string is -1."""

    id: int
    text: str
    logprob: float = 0.0
    special: bool = False
    alternatives: tuple[tuple[int, float], ...] = ()


class TokenAnswer:
    """The tokens of an answer, made from its stream's pieces, and at its end its text and its figures."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        """Read a request. Raises HttpError on what is not served."""
        parameters = request.get("parameters", {})
        self.options = options_of(parameters)
        self.has_details = bool(parameters.get("details"))
        self.names = {FORMATS: "grammar.value" if "grammar" in parameters else "response_format.schema"}
        self.text: str | None = None
        self.figures: dict[str, Any] | None = None
        self._prompt = request["inputs"]
        self._prefix = self._prompt if parameters.get("return_full_text") else ""
        self._seed = parameters.get("seed")
        self._count = 0
        self._held: Token | None = None

    def stream(self, call: HttpCall) -> AsyncGenerationStream:
        """Ask for the answer. Raises LoraplexError."""
        call.exchange.names = self.names
        return call.caller.generate_stream(self._prompt, timeout_s=call.timeout_s, **self.options)

    def take(self, piece: Piece) -> list[Token]:
        """Return the tokens that a piece brings.

        A token that may be the last waits for the next piece: a token without text, such as an end token, and the token
        that reaches the limit. Others are returned at once.
        """
        if piece.finished is not None:
            return self._last(piece.finished)
        tokens = []
        for index, token_id in enumerate(piece.token_ids):
            if self._held is not None:
                tokens.append(self._held)
            logprobs = piece.logprobs[index] if piece.logprobs else TokenLogprobs(0.0, ())
            # From an older router the first of several tokens has the text of all: the last may be an end token.
            text = piece.texts[index] if piece.texts else "" if index else piece.text
            self._held = Token(token_id, text, logprobs.logprob, alternatives=logprobs.alternatives)
            self._count += 1
            if text and self._count < self.options["max_tokens"]:
                tokens.append(self._held)
                self._held = None
        if piece.text and not piece.token_ids:  # Late text of earlier tokens.
            held = self._held or Token(-1, "")
            self._held = replace(held, text=held.text + piece.text)
        return tokens

    def _last(self, whole: Generation) -> list[Token]:
        held, stop = self._held, whole.stop if isinstance(whole.stop, str) else ""
        # LoRAX's text includes the stop string, Loraplex's ends before it.
        self.text = self._prefix + whole.text + stop
        self.figures = {
            "finish_reason": _REASONS[whole.finish_reason],
            "prompt_tokens": whole.usage.prompt_tokens,
            "input_length": whole.usage.prompt_tokens,  # TGI's name
            "generated_tokens": len(whole.token_ids),
            "seed": self._seed,
        }
        if isinstance(whole.stop, str):
            return [*([held] if held is not None else ()), Token(-1, stop)]
        last = held or Token(-1, "", special=True)
        return [replace(last, special=True) if whole.finish_reason is FinishReason.END else last]


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
    answer, tokens = TokenAnswer(request), list[Token]()
    async with answer.stream(call) as stream:
        async for piece in stream:
            if piece.finished is not None:
                call.finished(piece.finished)
            tokens += answer.take(piece)
    if answer.figures is None or not answer.has_details:
        return {"generated_text": answer.text}
    shown = await _tokens(call, [token for token in tokens if token.id >= 0])
    details = {**answer.figures, "prefill": [], "tokens": shown, "top_tokens": _tops(shown)}
    return {"generated_text": answer.text, "details": details}


async def _stream(call: HttpCall, request: Mapping[str, Any]) -> None:
    answer, exchange, index = TokenAnswer(request), call.exchange, 0
    async with answer.stream(call) as stream:
        await call.begin_when_admitted([stream])
        async for piece in stream:
            if not exchange.status:
                await call.begin()
            if piece.finished is not None:
                call.finished(piece.finished)
            events, tokens = b"", answer.take(piece)
            for token in tokens:
                index += 1
                is_last = piece.finished is not None and token is tokens[-1]
                (shown,) = await _tokens(call, [token])
                events += event(
                    {
                        "index": index,
                        "token": shown,
                        "top_tokens": shown["alternative_tokens"] or [],
                        "generated_text": answer.text if is_last else None,
                        "details": answer.figures if is_last else None,
                    }
                )
            if events:
                await exchange.write(events)
    await exchange.end()


async def _tokens(call: HttpCall, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Return tokens as JSON values; the texts of their alternatives are asked for, all at once."""
    size = sum(1 + len(token.alternatives) for token in tokens)
    others = await call.run(size, lambda: {other for token in tokens for other, _ in token.alternatives})
    texts = await call.cluster.token_bytes(call.caller, "", others) if others else {}

    def alternative(other: int, logprob: float) -> dict[str, Any]:
        return {"id": other, "logprob": logprob, "text": texts[other].decode(errors="replace"), "special": False}

    def told() -> list[dict[str, Any]]:
        return [
            {
                **{"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special},
                "alternative_tokens": raw([alternative(*other) for other in token.alternatives])
                if token.alternatives
                else None,
                "skipped": False,
            }
            for token in tokens
        ]

    return await call.run(size, told)


def _tops(tokens: list[dict[str, Any]]) -> list[Any] | None:
    """Return the likeliest tokens at each place in TGI's shape; None where they were not asked for."""
    return (
        [token["alternative_tokens"] or [] for token in tokens] if tokens and tokens[0]["alternative_tokens"] else None
    )


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
    return await call.named(request["model"]) if request.get("model") else {}


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
