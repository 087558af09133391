"""/v1/chat/completions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from loraplex_client import AsyncGenerationStream, Choice, Generation, Piece, ToolCallPart

from clients.gateway.endpoint import HttpCall
from clients.gateway.exchange import encode
from clients.gateway.openai_api.logprobs import TokenTexts
from clients.gateway.openai_api.protocol import DONE, REASONS, event, head_of, usage_of
from clients.gateway.openai_api.requests import CHAT, chat_options, wants_usage


async def chat_completions(call: HttpCall) -> None:
    """Answer a chat, whole or as a stream. Raises HttpError, LoraplexError."""
    request = CHAT.read(call.body)
    options, with_usage = chat_options(request), wants_usage(request)
    named = await call.cluster.named(call.caller, request["model"])
    request_id = secrets.token_hex(12)
    texts = TokenTexts(call, named.get("model", "")) if "logprobs" in options else None
    stream = call.caller.chat_stream(
        request["messages"], request_id=request_id, timeout_s=call.timeout_s, **named, **options
    )
    async with stream:
        if request.get("stream"):
            head = head_of("chat.completion.chunk", "chatcmpl", request_id, request["model"])
            await _Chunks(call, head, texts, options.get("n", 1), with_usage=with_usage).send(stream)
        else:
            head = head_of("chat.completion", "chatcmpl", request_id, request["model"])
            await call.exchange.answer(head | await _completion(call.finished(await stream.result()), texts))


async def _completion(whole: Generation, texts: TokenTexts | None) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": _message(choice),
            "logprobs": None if texts is None else await texts.of_chat(choice.token_ids, choice.logprobs),
            "finish_reason": REASONS[choice.finish_reason],
        }
        for index, choice in enumerate(whole.choices)
    ]
    return {
        "choices": choices,
        "usage": usage_of(whole.usage),
        "system_fingerprint": whole.adapter_revision or None,
    }


def _message(choice: Choice) -> dict[str, Any]:
    content = choice.text if choice.text or not choice.tool_calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return message


class _Chunks:
    """A stream of chunks, made of a stream of pieces; `n` is the number of its choices."""

    def __init__(
        self, call: HttpCall, head: dict[str, Any], texts: TokenTexts | None, n: int, *, with_usage: bool
    ) -> None:
        self._call = call
        # Chunks without token counts say so, where the last one has them.
        self._head = head | {"usage": None} if with_usage else head
        self._texts = texts
        self._n = n
        self._with_usage = with_usage
        # Everything of a chunk before the index of its choice.
        self._before = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":'
        self._begun: set[int] = set()
        # Choices whose end was sent.
        self._ended: set[int] = set()

    async def send(self, stream: AsyncGenerationStream) -> None:
        """Send the whole stream. Raises LoraplexError."""
        exchange = self._call.exchange
        async for piece in stream:
            if not exchange.status:
                await exchange.begin_events()
            if piece.finished is not None:
                await exchange.end(self._last(self._call.finished(piece.finished)))
            elif piece.ended is not None:
                # The last end waits for the summary: that follows at once and has the fingerprint.
                if len(self._ended) < self._n - 1:
                    self._ended.add(piece.choice)
                    await exchange.write(_end(self._head, piece.choice, piece.ended))
            elif chunk := await self._chunk(piece):
                await exchange.write(chunk)

    async def _chunk(self, piece: Piece) -> bytes:
        """Return the chunk of a piece; empty for one that shows nothing, such as an end token."""
        if self._texts is None and piece.choice in self._begun and not (piece.reasoning or piece.tool_calls):
            if not piece.text:
                return b""
            # The usual case, made without a dictionary.
            return b"%s%d,%s%s%s" % (self._before, piece.choice, _TEXT, encode(piece.text), _AFTER_TEXT)
        delta: dict[str, Any] = {}
        if piece.choice not in self._begun:
            self._begun.add(piece.choice)
            delta = {"role": "assistant", "content": ""}
        if piece.text:
            delta["content"] = piece.text
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            delta["tool_calls"] = _calls(piece.tool_calls)
        logprobs = None
        if self._texts is not None:
            logprobs = await self._texts.of_chat(piece.token_ids, piece.logprobs)
        choice = {"index": piece.choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return event({**self._head, "choices": [choice]})

    def _last(self, whole: Generation) -> bytes:
        head = self._head | {"system_fingerprint": whole.adapter_revision or None}
        events = [_end(head, index, choice) for index, choice in enumerate(whole.choices) if index not in self._ended]
        if self._with_usage:
            events.append(event({**head, "choices": [], "usage": usage_of(whole.usage)}))
        return b"".join((*events, DONE))


def _end(head: dict[str, Any], index: int, choice: Choice) -> bytes:
    reason = REASONS[choice.finish_reason]
    return event({**head, "choices": [{"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}]})


_TEXT, _AFTER_TEXT = b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null}]}\n\n'


def _calls(parts: Sequence[ToolCallPart]) -> list[dict[str, Any]]:
    return [
        {"index": part.index, "id": part.id, "type": "function"}
        | {"function": {"name": part.name, "arguments": part.arguments}}
        if part.id
        else {"index": part.index, "function": {"arguments": part.arguments}}
        for part in parts
    ]
