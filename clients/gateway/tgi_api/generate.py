"""/generate, /generate_stream and /."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from loraplex_client.lorax.ask import Ask
from loraplex_client.lorax.types import StreamDetails, StreamResponse, Token

from clients.gateway.endpoint import HttpCall
from clients.gateway.tgi_api.protocol import event
from clients.gateway.tgi_api.requests import GENERATE, ask_of


async def generate(call: HttpCall) -> None:
    """Answer a prompt. Raises HttpError, LoraplexError."""
    request = GENERATE.read(call.body)
    await call.exchange.answer(await _whole(call, request))


async def generate_stream(call: HttpCall) -> None:
    """Answer a prompt token by token. Raises HttpError, LoraplexError."""
    await _stream(call, GENERATE.read(call.body))


async def generate_either(call: HttpCall) -> None:
    """Answer a prompt as the request's `stream` says; a whole answer is in a list. Raises HttpError, LoraplexError."""
    request = GENERATE.read(call.body)
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
        async for piece in stream:
            if not exchange.status:
                await exchange.begin_events()
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
    found = [asdict(token) for token in tokens]
    others = [other for token in found for other in token["alternative_tokens"] or ()]
    if others:
        texts = await call.cluster.token_bytes(call.caller, "", (other["id"] for other in others))
        for other in others:
            other |= {"text": texts[other["id"]].decode(errors="replace"), "special": False}
    return found


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
