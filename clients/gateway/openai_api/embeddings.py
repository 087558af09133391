"""/v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from clients.gateway.endpoint import HttpCall
from clients.gateway.errors import invalid, not_served
from clients.gateway.openai_api.requests import EMBEDDING


async def embeddings(call: HttpCall) -> None:
    """Answer with a vector of each text. Raises HttpError, LoraplexError."""
    request = EMBEDDING.read(call.body)
    if request.get("dimensions") is not None:
        raise not_served("dimensions")
    texts = _texts(request["input"])
    named = await call.cluster.named(call.caller, request["model"])
    found = await call.caller.embed(texts, timeout_s=call.timeout_s, **named)
    as_text = request.get("encoding_format") == "base64"
    tokens = found.usage.prompt_tokens
    await call.exchange.answer(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _encoded(vector) if as_text else vector}
                for index, vector in enumerate(found.vectors)
            ],
            "model": request["model"],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def _texts(given: Any) -> list[Any]:
    """Return each text, or its ids. Raises HttpError."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid("input", "is empty")
    return [given] if isinstance(given[0], int) else list(given)


def _encoded(vector: Sequence[float]) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
