"""/v1/messages, and the count of their tokens."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from loraplex_client import AsyncGenerationStream, Generation, Piece

from clients.gateway.anthropic_api.protocol import REASONS, event, usage_of
from clients.gateway.anthropic_api.requests import COUNT, MESSAGES, named, options_of
from clients.gateway.endpoint import HttpCall


async def messages(call: HttpCall) -> None:
    """Answer a conversation, whole or as a stream. Raises HttpError, LoraplexError."""
    request = MESSAGES.read(call.body)
    options = options_of(request)
    model = await call.cluster.named(call.caller, request["model"])
    request_id = secrets.token_hex(12)
    head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": request["model"]}
    with named(request):
        stream = call.caller.chat_stream(
            options.pop("messages"), request_id=request_id, timeout_s=call.timeout_s, **model, **options
        )
        async with stream:
            if request.get("stream"):
                await _Events(call, head).send(stream)
            else:
                whole = call.finished(await stream.result())
                await call.exchange.answer(
                    head | {"content": _content(whole)} | _end(whole) | {"usage": usage_of(whole.usage)}
                )


async def count_tokens(call: HttpCall) -> None:
    """Answer with the number of tokens of a conversation. Raises HttpError, LoraplexError."""
    request = COUNT.read(call.body)
    options = options_of(request)
    model = await call.cluster.named(call.caller, request["model"])
    with named(request):
        count = await call.caller.count_tokens(**model, **options)
    await call.exchange.answer({"input_tokens": count})


def _content(whole: Generation) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if whole.reasoning:
        blocks.append({"type": "thinking", "thinking": whole.reasoning, "signature": ""})
    if whole.text:
        blocks.append({"type": "text", "text": whole.text})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)}
        for call in whole.tool_calls
    ]
    return blocks


def _object(arguments: str) -> Any:
    """Return arguments as an object; empty where the answer was cut in the middle of them."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {}


def _end(whole: Generation) -> dict[str, Any]:
    stop = whole.stop if isinstance(whole.stop, str) else None
    return {"stop_reason": REASONS[whole.finish_reason], "stop_sequence": stop}


class _Events:
    """A stream of events, made of a stream of pieces: blocks of thinking, text and calls, one after the other."""

    def __init__(self, call: HttpCall, head: Mapping[str, Any]) -> None:
        self._call = call
        self._head = head
        # The number of the open block, -1 before the first, and what it holds: a kind, or the index of a call.
        self._index = -1
        self._open: str | int | None = None

    async def send(self, stream: AsyncGenerationStream) -> None:
        """Send the whole stream. Raises LoraplexError."""
        exchange = self._call.exchange
        async for piece in stream:
            if not exchange.status:
                await exchange.begin_events()
                await exchange.write(self._start())
            if piece.finished is not None:
                await exchange.end(self._last(self._call.finished(piece.finished)))
            elif events := self._events(piece):
                await exchange.write(events)

    def _start(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}  # known at the end
        end = {"stop_reason": None, "stop_sequence": None}
        return event("message_start", message={**self._head, "content": [], **end, "usage": usage})

    def _events(self, piece: Piece) -> bytes:
        events = b""
        if piece.reasoning:
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            events += self._delta("thinking", empty, {"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            empty = {"type": "text", "text": ""}
            events += self._delta("text", empty, {"type": "text_delta", "text": piece.text})
        for part in piece.tool_calls:
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            events += self._delta(part.index, block, {"type": "input_json_delta", "partial_json": part.arguments})
        return events

    def _delta(self, holds: str | int, block: Mapping[str, Any], delta: Mapping[str, Any]) -> bytes:
        """Return the event of a block's part, behind those that close the former block and open this one."""
        events = b""
        if holds != self._open:
            events = self._close()
            self._open = holds
            self._index += 1
            events += event("content_block_start", index=self._index, content_block=block)
        return events + event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        return b"" if self._open is None else event("content_block_stop", index=self._index)

    def _last(self, whole: Generation) -> bytes:
        end = event("message_delta", delta=_end(whole), usage=usage_of(whole.usage))
        return self._close() + end + event("message_stop")
