"""/info and /tokenize."""

from __future__ import annotations

from importlib.metadata import version

from clients.gateway.endpoint import HttpCall
from clients.gateway.errors import HttpError
from clients.gateway.tgi_api.requests import TOKENIZE

# Maximum of answers, and of stop strings, that routers take in a request.
_BEST_OF = _STOPS = 16


async def info(call: HttpCall) -> None:
    """Answer with what is served. Raises HttpError, LoraplexError."""
    models = await call.cluster.models(call.caller)
    if not models:
        raise HttpError(503, "not_serving", "no base model is registered", retry_after_s=1.0)
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


async def tokenize(call: HttpCall) -> None:
    """Answer with the tokens of a prompt, each with its place in it. Raises HttpError, LoraplexError."""
    request = TOKENIZE.read(call.body)
    text = request["inputs"]
    adapter = (request.get("parameters") or {}).get("adapter_id")
    add = request.get("add_special_tokens")
    ids = await call.caller.tokenize(text, adapter_id=adapter, add_special_tokens=add)
    found = await call.cluster.token_bytes(call.caller, "", ids)
    data, begin, at, tokens = text.encode(), 0, 0, []
    for token_id in ids:
        own, start = found[token_id], at
        if data.startswith(own, begin):  # others, such as a beginning of sequence, are not in the text
            begin += len(own)
            at += sum(byte & 0xC0 != 0x80 for byte in own)  # characters that begin in the token
        tokens.append({"id": token_id, "text": own.decode(errors="replace"), "start": start, "stop": at})
    await call.exchange.answer(tokens)
