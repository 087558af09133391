"""/v1/completions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from loraplex_client import AsyncGenerationStream, Choice, Generation, Piece, Usage

from clients.gateway.endpoint import HttpCall
from clients.gateway.errors import invalid
from clients.gateway.openai_api.logprobs import TokenTexts
from clients.gateway.openai_api.protocol import DONE, REASONS, event, head_of, usage_of
from clients.gateway.openai_api.requests import COMPLETION, completion_options, wants_usage

# Maximum number of prompts of a request; each becomes a request of its own.
_PROMPTS = 64


async def completions(call: HttpCall) -> None:
    """Answer prompts, whole or as a stream. Raises HttpError, LoraplexError."""
    request = COMPLETION.read(call.body)
    options, with_usage = completion_options(request), wants_usage(request)
    prompts = _prompts(request["prompt"])
    named = await call.cluster.named(call.caller, request["model"])
    request_id = secrets.token_hex(12)
    head = head_of("text_completion", "cmpl", request_id, request["model"])
    texts = None if options["logprobs"] is None else TokenTexts(call, named.get("model", ""))
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(
                call.caller.generate_stream(
                    **prompt, request_id=f"{request_id}-{number}", timeout_s=call.timeout_s, **named, **options
                )
            )
            for number, prompt in enumerate(prompts)
        ]
        if request.get("stream"):
            await _Chunks(call, head, texts, options.get("n", 1), with_usage=with_usage).send(streams)
        else:
            wholes = [call.finished(whole) for whole in await _results(streams)]
            choices = [choice for whole in wholes for choice in whole.choices]
            await call.exchange.answer(
                head
                | {
                    "choices": [await _choice(index, choice, texts) for index, choice in enumerate(choices)],
                    "usage": usage_of(_sum(wholes)),
                    "system_fingerprint": wholes[0].adapter_revision or None,
                }
            )


def _prompts(given: Any) -> list[dict[str, Any]]:
    """Return each prompt as options of the SDK: a text or ids. Raises HttpError."""
    if given is None:
        raise invalid("prompt", "is required")
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not 1 <= len(given) <= _PROMPTS:
        raise invalid("prompt", f"{len(given)} prompts; 1 to {_PROMPTS} of them")
    return [{"prompt": one} if isinstance(one, str) else {"token_ids": one} for one in given]


async def _results(streams: Sequence[AsyncGenerationStream]) -> list[Generation]:
    """Return all answers. Raises the error of the first that fails, whose others the caller cancels."""
    return list(await asyncio.gather(*(stream.result() for stream in streams)))


async def _choice(index: int, choice: Choice, texts: TokenTexts | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": choice.text,
        "logprobs": None if texts is None else await texts.of_completion(choice.token_ids, choice.logprobs, 0),
        "finish_reason": REASONS[choice.finish_reason],
    }


def _sum(wholes: Sequence[Generation]) -> Usage:
    return Usage(
        sum(whole.usage.prompt_tokens for whole in wholes),
        sum(whole.usage.cached_tokens for whole in wholes),
        sum(whole.usage.completion_tokens for whole in wholes),
    )


class _Chunks:
    """A stream of chunks, made of streams of pieces, one of each prompt."""

    def __init__(
        self, call: HttpCall, head: dict[str, Any], texts: TokenTexts | None, n: int, *, with_usage: bool
    ) -> None:
        self._call = call
        # Chunks without token counts say so, where the last one has them.
        self._head = head | {"usage": None} if with_usage else head
        self._texts = texts
        self._n = n
        self._with_usage = with_usage
        self._wholes: list[Generation] = []
        # Characters of each choice so far.
        self._lengths: dict[int, int] = {}

    async def send(self, streams: Sequence[AsyncGenerationStream]) -> None:
        """Send the streams, merged. Raises LoraplexError."""
        exchange = self._call.exchange
        async for number, piece in _merged(streams):
            if not exchange.status:
                await exchange.begin_events()
            if piece.finished is not None:
                self._wholes.append(self._call.finished(piece.finished))
            elif piece.ended is not None:
                index = number * self._n + piece.choice
                await exchange.write(self._event(index, "", REASONS[piece.ended.finish_reason]))
            elif piece.text or self._texts is not None:
                index = number * self._n + piece.choice
                await exchange.write(self._event(index, piece.text, None, await self._logprobs(index, piece)))
        usage = {**self._head, "choices": [], "usage": usage_of(_sum(self._wholes))}
        await exchange.end((event(usage) if self._with_usage else b"") + DONE)

    def _event(self, index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return event({**self._head, "choices": [choice]})

    async def _logprobs(self, index: int, piece: Piece) -> dict[str, Any] | None:
        if self._texts is None:
            return None
        at = self._lengths.get(index, 0)
        self._lengths[index] = at + len(piece.text)
        return await self._texts.of_completion(piece.token_ids, piece.logprobs, at)


async def _merged(streams: Sequence[AsyncGenerationStream]) -> AsyncIterator[tuple[int, Piece]]:
    """Yield the pieces of all streams as they come, each with its stream's number."""
    if len(streams) == 1:
        async for piece in streams[0]:
            yield 0, piece
        return
    waiting = {asyncio.ensure_future(anext(stream)): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                try:
                    piece = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(streams[number]))] = number
                yield number, piece
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
