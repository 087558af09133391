"""Log probabilities in the two shapes of OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loraplex_client import TokenLogprobs

from clients.gateway.endpoint import HttpCall


class TokenTexts:
    """Texts of the tokens of an answer by `model`."""

    def __init__(self, call: HttpCall, model: str) -> None:
        self._call = call
        self._model = model

    async def of_chat(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the logprobs of a chat's tokens. Raises LoraplexError."""
        found = await self._bytes(ids, logprobs)
        content = [
            {
                **_entry(found[token_id], token.logprob),
                "top_logprobs": [_entry(found[other], logprob) for other, logprob in token.alternatives],
            }
            for token_id, token in zip(ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    async def of_completion(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], at: int) -> dict[str, Any]:
        """Return the logprobs of a completion's tokens; `at` characters of its text come before them."""
        found = await self._bytes(ids, logprobs)
        texts = [_text(found[token_id]) for token_id in ids]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in logprobs],
            "top_logprobs": [
                {_text(found[other]): logprob for other, logprob in token.alternatives} for token in logprobs
            ],
            "text_offset": [at + sum(map(len, texts[:index])) for index in range(len(texts))],
        }

    async def _bytes(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Mapping[int, bytes]:
        others = [other for token in logprobs for other, _ in token.alternatives]
        return await self._call.cluster.token_bytes(self._call.caller, self._model, [*ids, *others])


def _text(token: bytes) -> str:
    return token.decode(errors="replace")


def _entry(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(token), "logprob": logprob, "bytes": list(token)}
