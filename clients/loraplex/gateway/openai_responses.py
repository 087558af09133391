"""Answers of /v1/responses of OpenAI's protocol, whole or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from loraplex.gateway.endpoint import HttpCall, Protocol
from loraplex.gateway.errors import HttpError
from loraplex.gateway.exchange import encode
from loraplex.gateway.openai_api import error_of, format_names
from loraplex.gateway.openai_completions import LogprobTexts
from loraplex.gateway.openai_responses_input import RESPONSE, conversation, items_of, options_of, served_tools
from loraplex_client import AsyncGenerationStream, FinishReason, Generation, Piece, ToolCallPart, Usage

# Names of this protocol for the cluster's.
_NAMES = {
    "json_schema": "text.format.schema",
    "max_tokens": "max_output_tokens",
    "template_args": "reasoning",
    "logprobs": "top_logprobs",
    r"(chat|messages)$": "input",
    "adapter$": "model",
}


def _error_events(error: HttpError) -> bytes:
    payload = error_of(error, _NAMES)["error"]
    # OpenAI's clients look for the error in a field of its own; the event's declared type has its fields flat.
    fields = {"type": "error", "sequence_number": 0, **{name: payload[name] for name in ("code", "message", "param")}}
    return b"event: error\ndata: " + encode({**fields, "error": payload}) + b"\n\n"


PROTOCOL = Protocol(lambda error: error_of(error, _NAMES), _error_events)


def _head(request: Mapping[str, Any], response_id: str) -> dict[str, Any]:
    """Return the fields of an answer that are known before it is made."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "error": None,
        "instructions": request.get("instructions"),
        "max_output_tokens": request.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": request.get("metadata") or {},
        "model": request["model"],
        "parallel_tool_calls": request.get("parallel_tool_calls", True),
        "previous_response_id": request.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None, **(request.get("reasoning") or {})},
        "service_tier": "default",
        "store": request.get("store", True),
        "temperature": request.get("temperature"),  # null: the model's own, which the router knows
        "text": {"format": {"type": "text"}, **(request.get("text") or {})},
        "tool_choice": request.get("tool_choice", "auto"),
        "tools": [_told(tool) for tool in request.get("tools") or () if tool["type"] in ("function", "namespace")],
        "top_logprobs": request.get("top_logprobs") or 0,
        "top_p": request.get("top_p"),
        "truncation": request.get("truncation", "disabled"),
        "user": request.get("user"),
    }


def _told(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"parameters": None, "strict": None, **tool} if tool["type"] == "function" else tool


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # they are not counted apart
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


async def responses(call: HttpCall) -> None:
    """Answer a turn of a conversation, whole or as a stream of events. Raises HttpError, LoraplexError."""
    request = await call.read(RESPONSE)
    options, items = options_of(request), items_of(request)
    call.exchange.names = format_names(request)
    before = request.get("previous_response_id")
    earlier = [] if before is None else call.turns.items(call.claimed, before)
    chat = conversation(request, earlier, items)
    model = await call.named(request["model"])
    texts = LogprobTexts(call, model.get("model", "")) if "logprobs" in options else None
    request_id = call.exchange.request_id
    response_id, as_events = f"resp_{request_id}", bool(request.get("stream"))
    namespaces = {tool.function["name"]: tool.namespace for tool in served_tools(request) if tool.namespace}
    answer = _Answer(call, _head(request, response_id), texts, namespaces, as_events=as_events)
    with chat.naming_origins():
        stream = call.caller.chat_stream(
            chat.messages, request_id=request_id, timeout_s=call.timeout_s, **model, **options
        )
        async with stream:
            last = await answer.receive(stream)
    if request.get("store", True):
        call.turns.keep(call.claimed, response_id, [*earlier, *items, *map(_without_logprobs, answer.output)])
    if as_events:
        await call.exchange.end(last)
    else:
        await call.exchange.answer(answer.whole)


def _without_logprobs(item: Mapping[str, Any]) -> Mapping[str, Any]:
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


# Reasons of an incomplete response.
_CUTS = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}


class _Answer:
    """An answer that grows by pieces: items of reasoning, text and calls, one after the other, told by events."""

    def __init__(
        self,
        call: HttpCall,
        head: dict[str, Any],
        texts: LogprobTexts | None,
        namespaces: Mapping[str, str],
        *,
        as_events: bool,
    ) -> None:
        self._call = call
        self._as_events = as_events
        self._head = head
        self._texts = texts
        # Those of the functions that have one.
        self._namespaces = namespaces
        # The number of the next event.
        self._number = 0
        # The kind of the open item, `reasoning` or `message`, or the index of its call; None: no item is open.
        self._open: str | int | None = None
        # All items, the last one open or not; and the answer, once it is whole.
        self.output: list[dict[str, Any]] = []
        self.whole: dict[str, Any] = {}

    async def receive(self, stream: AsyncGenerationStream) -> bytes:
        """Receive the whole stream and send its events but the last, which are returned. Raises LoraplexError."""
        exchange, as_events = self._call.exchange, self._as_events
        if as_events:
            await self._call.begin_when_admitted([stream], self._start())
        async for piece in stream:
            if as_events and not exchange.status:
                await self._call.begin(self._start())
            if piece.finished is not None:
                return self._finish(self._call.finished(piece.finished))
            events = await self._events(piece)
            if events:
                await exchange.write(events)
        raise AssertionError("a stream ends with the whole answer, or an error")

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._as_events:
            return b""
        payload = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode(payload))

    def _start(self) -> bytes:
        response = self._head | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    async def _events(self, piece: Piece) -> bytes:
        # A message may end a call, go on with text, and begin another call.
        begun = [call for call in piece.tool_calls if call.index != self._open]
        events = self._arguments([call for call in piece.tool_calls if call.index == self._open])
        if piece.reasoning:
            events += self._reach("reasoning")
            self.output[-1]["content"][0]["text"] += piece.reasoning
            events += self._part_event("response.reasoning_text.delta", delta=piece.reasoning)
        if piece.text or (self._texts is not None and not piece.reasoning and not piece.tool_calls and piece.token_ids):
            events += self._reach("message")
            logprobs = []
            if self._texts is not None:
                logprobs = (await self._texts.of_chat(piece.token_ids, piece.logprobs))["content"]
            part = self.output[-1]["content"][0]
            part["text"] += piece.text
            part["logprobs"] += logprobs
            events += self._part_event("response.output_text.delta", delta=piece.text, logprobs=logprobs)
        return events + self._arguments(begun)

    def _arguments(self, calls: Sequence[ToolCallPart]) -> bytes:
        events = b""
        for call in calls:
            events += self._reach(call.index, call_id=call.id, name=call.name)
            self.output[-1]["arguments"] += call.arguments
            if call.arguments:
                events += self._item_event("response.function_call_arguments.delta", delta=call.arguments)
        return events

    def _reach(self, holds: str | int, **call: str) -> bytes:
        """Return the events that close the open item and open this one, unless it is the one that is open."""
        if holds == self._open:
            return b""
        events = self._close()
        self._open = holds
        number, base = len(self.output), {"status": "in_progress"}
        name = f"{self._head['id'].removeprefix('resp_')}{number:02d}"
        if holds == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            item = {"type": "reasoning", "id": f"rs_{name}", **base, "summary": []}
        elif holds == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": "message", "id": f"msg_{name}", **base, "role": "assistant"}
        else:
            own = {"namespace": self._namespaces[call["name"]]} if call["name"] in self._namespaces else {}
            self.output.append({"type": "function_call", "id": f"fc_{name}", **base, **call, **own, "arguments": ""})
            return events + self._event("response.output_item.added", output_index=number, item=self.output[-1])
        self.output.append(item | {"content": []})
        events += self._event("response.output_item.added", output_index=number, item=self.output[-1])
        self.output[-1]["content"].append(part)
        return events + self._part_event("response.content_part.added", part=part)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self.output[-1]["id"], output_index=len(self.output) - 1, **fields)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _close(self, status: str = "completed") -> bytes:
        """Return the events of the end of the open item; none where none is open."""
        if self._open is None:
            return b""
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            events = self._item_event(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
        else:
            part = item["content"][0]
            if item["type"] == "message":
                fields = {"text": part["text"], "logprobs": part["logprobs"]}
                events = self._part_event("response.output_text.done", **fields)
            else:
                events = self._part_event("response.reasoning_text.done", text=part["text"])
            events += self._part_event("response.content_part.done", part=part)
        self._open = None
        return events + self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _finish(self, whole: Generation) -> bytes:
        cut = _CUTS.get(whole.finish_reason)
        status = "incomplete" if cut else "completed"
        events = b"" if self.output else self._reach("message")
        events += self._close(status)
        self.whole = self._head | {
            "status": status,
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": cut} if cut else None,
            "output": self.output,
            "usage": _usage(whole.usage),
        }
        return events + self._event(f"response.{status}", response=self.whole)
