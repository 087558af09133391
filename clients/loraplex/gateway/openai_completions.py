"""/v1/chat/completions and /v1/completions of OpenAI's protocol: answers, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import accumulate, chain
from typing import Any, TypeVar

import msgspec

from loraplex.gateway.endpoint import HttpCall
from loraplex.gateway.errors import invalid
from loraplex.gateway.exchange import encode, raw
from loraplex.gateway.openai_api import (
    CHAT,
    COMPLETION,
    DONE,
    REASONS,
    StreamUsage,
    chat_options,
    completion_options,
    counts_of,
    event,
    format_names,
    head_of,
    shows_ids,
    stream_usage,
)
from loraplex.gateway.openai_messages import sdk_messages
from loraplex_client import AsyncGenerationStream, Choice, Generation, Piece, TokenLogprobs, ToolCallPart

# Maximum number of prompts of a request; each becomes a request of its own.
_PROMPTS = 64
T = TypeVar("T")


class LogprobTexts:
    """Texts of the tokens of an answer by `model`; `as_ids`: each is `token_id:ID`, as vLLM writes it."""

    def __init__(self, call: HttpCall, model: str, *, as_ids: bool = False) -> None:
        self._call = call
        self._model = model
        self._as_ids = as_ids

    async def of_chat(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the logprobs of a chat's tokens. Raises LoraplexError."""

        def told(token_bytes: Mapping[int, bytes]) -> list[msgspec.Raw]:
            def entry(token_id: int, logprob: float) -> dict[str, Any]:
                own = token_bytes[token_id]
                return {"token": self._text(token_id, own), "logprob": logprob, "bytes": list(own)}

            return [
                raw(
                    {
                        **entry(token_id, token.logprob),
                        "top_logprobs": [entry(other, logprob) for other, logprob in token.alternatives],
                    }
                )
                for token_id, token in zip(ids, logprobs, strict=True)
            ]

        return {"content": await self._told(ids, logprobs, told), "refusal": None}

    async def of_completion(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], at: int
    ) -> dict[str, Any]:
        """Return the logprobs of a completion's tokens; `at` characters of its text come before them.

        The first token of a prompt has None.
        """

        def told(token_bytes: Mapping[int, bytes]) -> dict[str, Any]:
            return {
                "tokens": [self._text(token_id, token_bytes[token_id]) for token_id in ids],
                "token_logprobs": [None if token is None else token.logprob for token in logprobs],
                "top_logprobs": [
                    None
                    if token is None
                    else raw({self._text(other, token_bytes[other]): logprob for other, logprob in token.alternatives})
                    for token in logprobs
                ],
                "text_offset": text_offsets([token_bytes[token_id] for token_id in ids], at),
            }

        return await self._told(ids, logprobs, told)

    async def of_prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[Any]:
        """Return the log probabilities of a prompt in vLLM's shape. Raises LoraplexError."""

        def told(token_bytes: Mapping[int, bytes]) -> list[Any]:
            places: list[Any] = [None]
            for token_id, token in zip(ids[1:], logprobs, strict=True):
                ranks = {other: rank for rank, (other, _) in enumerate(token.alternatives, 1)}
                ranked = {**dict(token.alternatives), token_id: token.logprob}
                place = {
                    other: {
                        "logprob": logprob,
                        "rank": ranks.get(other),
                        "decoded_token": token_bytes[other].decode(errors="replace"),
                    }
                    for other, logprob in ranked.items()
                }
                places.append(raw(place))
            return places

        return await self._told(ids, logprobs, told)

    def _text(self, token_id: int, own: bytes) -> str:
        return f"token_id:{token_id}" if self._as_ids else own.decode(errors="replace")

    async def _told(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], tell: Callable[[Mapping[int, bytes]], T]
    ) -> T:
        """Return what `tell` makes of the bytes of these tokens and of their alternatives."""
        alternatives = [token.alternatives for token in logprobs if token is not None]
        size = len(ids) + sum(map(len, alternatives))
        distinct = await self._call.run(size, lambda: {*ids, *(other for of in alternatives for other, _ in of)})
        token_bytes = await self._call.cluster.token_bytes(self._call.caller, self._model, distinct)
        return await self._call.run(size, partial(tell, token_bytes))


def text_offsets(tokens: Sequence[bytes], at: int) -> list[int]:
    """Return the place of each token in a text, of which `at` characters come before them.

    A character may have several tokens; it counts for the one in which it begins.
    """
    begun = [sum(byte & 0xC0 != 0x80 for byte in token) for token in tokens]
    return list(accumulate(begun[:-1], initial=at)) if tokens else []


async def chat_completions(call: HttpCall) -> None:
    """Answer a chat, whole or as a stream. Raises HttpError, LoraplexError."""
    request = await call.read(CHAT)
    options, usage, with_ids = chat_options(request), stream_usage(request), shows_ids(request)
    options.setdefault("logprobs_mode", call.logprobs_mode)
    call.exchange.names = format_names(request)
    messages = sdk_messages(request["messages"])
    named = await call.named(request["model"])
    request_id = call.exchange.request_id
    texts = _texts(call, request, named) if "logprobs" in options else None
    shows_reasoning = request.get("include_reasoning") is not False
    stream = call.caller.chat_stream(messages, request_id=request_id, timeout_s=call.timeout_s, **named, **options)
    async with stream:
        if request.get("stream"):
            head = head_of("chat.completion.chunk", "chatcmpl", request_id, request["model"])
            count = partial(_prompt_tokens, call, [{"messages": messages}], {**named, **options})
            chunks = _ChatChunks(call, head, texts, options.get("n", 1), usage, count)
            chunks.shows_reasoning = shows_reasoning
            await chunks.send(stream)
        else:
            head = head_of("chat.completion", "chatcmpl", request_id, request["model"])
            whole = call.finished(await stream.result())
            if with_ids or "prompt_logprobs" in options:
                of_chat = {name: value for name, value in options.items() if name in _OF_CHATS}
                special = options.get("add_special_tokens")
                ids = await call.caller.tokenize(
                    messages=messages, add_special_tokens=special, chat_options=of_chat, **named
                )
                if "prompt_logprobs" in options:
                    head["prompt_logprobs"] = await _texts(call, request, named).of_prompt(ids, whole.prompt_logprobs)
                if with_ids:
                    head["prompt_token_ids"] = ids
            await call.exchange.answer(head | await _completion(whole, texts, shows_reasoning, with_ids))


# Options that a chat is rendered with.
_OF_CHATS = (
    "tools", "tool_choice", "continue_final_message", "add_generation_prompt", "template_args",
)  # fmt: skip


def _texts(call: HttpCall, request: Mapping[str, Any], named: Mapping[str, Any]) -> LogprobTexts:
    return LogprobTexts(call, named.get("model", ""), as_ids=bool(request.get("return_tokens_as_token_ids")))


async def _completion(
    whole: Generation, texts: LogprobTexts | None, shows_reasoning: bool, with_ids: bool
) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": _message(choice, shows_reasoning),
            "logprobs": None if texts is None else await texts.of_chat(choice.token_ids, choice.logprobs),
            "finish_reason": REASONS[choice.finish_reason],
        }
        | ({"token_ids": choice.token_ids} if with_ids else {})
        for index, choice in enumerate(whole.choices)
    ]
    return {
        "choices": choices,
        "system_fingerprint": whole.adapter_revision or None,
        **counts_of([whole]),
    }


def _message(choice: Choice, shows_reasoning: bool) -> dict[str, Any]:
    content = choice.text if choice.text or not choice.tool_calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": choice.refusal or None}
    if choice.reasoning and shows_reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return message


async def _prompt_tokens(call: HttpCall, prompts: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> int:
    """Return the number of tokens of all prompts. Raises LoraplexError."""
    plain = {name: value for name, value in options.items() if name != "response_format"}
    return sum(await asyncio.gather(*(call.caller.count_tokens(**prompt, **plain) for prompt in prompts)))


class _Chunks:
    """A stream of chunks, made of pieces; `n` is the number of a prompt's choices, `count` counts prompts' tokens."""

    def __init__(
        self,
        call: HttpCall,
        head: dict[str, Any],
        texts: LogprobTexts | None,
        n: int,
        usage: StreamUsage,
        count: Callable[[], Awaitable[int]],
    ) -> None:
        self._call = call
        # Chunks without token counts say so, where the last one has them.
        self._head = head | {"usage": None} if usage.last else head
        self._texts = texts
        self._n = n
        self._usage = usage
        self._count = count
        self._prompt_tokens = 0
        # Tokens of all choices so far.
        self._tokens = 0
        # Everything of a chat's chunk before the index of its choice.
        self._before = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":'
        # Choices whose beginning was sent, and those whose end was.
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        # Whole answers to the prompts of a completion, and characters of each of their choices so far.
        self._wholes: list[Generation] = []
        self._lengths: dict[int, int] = {}

    async def _begin(self, streams: Sequence[AsyncGenerationStream]) -> None:
        """Begin once the requests are admitted. Raises LoraplexError."""
        await self._call.begin_when_admitted(streams)
        if self._usage.every:  # counted while the workers compute the first token
            self._prompt_tokens = await self._count()

    def _head_now(self) -> dict[str, Any]:
        """Return the head of the next chunk, with the token counts so far where every chunk has them."""
        if not self._usage.every:
            return self._head
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._tokens}
        return self._head | {"usage": counts | {"total_tokens": self._prompt_tokens + self._tokens}}


class _ChatChunks(_Chunks):
    """The chunks of a chat."""

    shows_reasoning = True

    async def send(self, stream: AsyncGenerationStream) -> None:
        """Send the whole stream. Raises LoraplexError."""
        exchange = self._call.exchange
        await self._begin([stream])
        async for piece in stream:
            if not exchange.status:
                await self._call.begin()
            self._tokens += len(piece.token_ids)
            if piece.finished is not None:
                await exchange.end(self._last(self._call.finished(piece.finished)))
            elif piece.ended is not None:
                # The last end waits for the summary: that follows at once and has the fingerprint.
                if len(self._ended) < self._n - 1:
                    self._ended.add(piece.choice)
                    await exchange.write(_end(self._head_now(), piece.choice, piece.ended))
            elif chunk := await self._chunk(piece):
                await exchange.write(chunk)

    async def _chunk(self, piece: Piece) -> bytes:
        """Return the chunk of a piece; empty for one that shows nothing, such as an end token."""
        reasoning = piece.reasoning if self.shows_reasoning else ""
        is_text = self._texts is None and piece.choice in self._begun and not (reasoning or piece.tool_calls)
        if is_text and not piece.text:
            return b""
        if is_text and not self._usage.every:  # the usual case, made without a dictionary
            return b"%s%d,%s%s%s" % (self._before, piece.choice, _TEXT, encode(piece.text), _AFTER_TEXT)
        delta: dict[str, Any] = {}
        if piece.choice not in self._begun:
            self._begun.add(piece.choice)
            delta = {"role": "assistant", "content": ""}
        if piece.text:
            delta["content"] = piece.text
        if piece.reasoning and self.shows_reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            delta["tool_calls"] = _calls(piece.tool_calls)
        logprobs = None
        if self._texts is not None:
            logprobs = await self._texts.of_chat(piece.token_ids, piece.logprobs)
        choice = {"index": piece.choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return event({**self._head_now(), "choices": [choice]})

    def _last(self, whole: Generation) -> bytes:
        head = self._head_now() | {"system_fingerprint": whole.adapter_revision or None}
        events = [_end(head, index, choice) for index, choice in enumerate(whole.choices) if index not in self._ended]
        if self._usage.last:
            events.append(event({**head, "choices": [], **counts_of([whole])}))
        return b"".join((*events, DONE))


def _end(head: dict[str, Any], index: int, choice: Choice) -> bytes:
    reason = REASONS[choice.finish_reason]
    delta = {"refusal": choice.refusal} if choice.refusal else {}
    return event({**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}]})


_TEXT, _AFTER_TEXT = b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null}]}\n\n'


def _calls(parts: Sequence[ToolCallPart]) -> list[dict[str, Any]]:
    return [
        {"index": part.index, "id": part.id, "type": "function"}
        | {"function": {"name": part.name, "arguments": part.arguments}}
        if part.id
        else {"index": part.index, "function": {"arguments": part.arguments}}
        for part in parts
    ]


async def completions(call: HttpCall) -> None:
    """Answer prompts, whole or as a stream. Raises HttpError, LoraplexError."""
    request = await call.read(COMPLETION)
    options, usage, with_ids = completion_options(request), stream_usage(request), shows_ids(request)
    options.setdefault("logprobs_mode", call.logprobs_mode)
    call.exchange.names = format_names(request)
    prompts = _prompts(request["prompt"])
    named = await call.named(request["model"])
    request_id = call.exchange.request_id
    head = head_of("text_completion", "cmpl", request_id, request["model"])
    texts = None if options["logprobs"] is None else _texts(call, request, named)
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
            count = partial(_prompt_tokens, call, prompts, {**named, **options})
            await _CompletionChunks(call, head, texts, options.get("n", 1), usage, count).send(streams)
        else:
            # The first that fails raises, and leaving the stack cancels the others.
            wholes = [call.finished(one) for one in await asyncio.gather(*(stream.result() for stream in streams))]
            ids: list[Sequence[int]] = [()] * len(prompts)
            if with_ids or "prompt_logprobs" in options:
                ids = await _prompt_ids(call, prompts, named, options)
            echoes = texts is not None and options.get("echo")
            choices = [
                (choice, own if echoes else (), whole.prompt_logprobs)
                for whole, own in zip(wholes, ids, strict=True)
                for choice in whole.choices
            ]
            answered = [await _choice(index, texts, *choice) for index, choice in enumerate(choices)]
            if with_ids:
                for (made, _, _), answer, own in zip(
                    choices, answered, chain.from_iterable([one] * options.get("n", 1) for one in ids), strict=True
                ):
                    answer |= {"token_ids": made.token_ids, "prompt_token_ids": own}
            if request.get("prompt_logprobs") is not None:
                of_prompts = _texts(call, request, named)
                for index, choice in enumerate(answered):
                    number = index // options.get("n", 1)
                    told = await of_prompts.of_prompt(ids[number], wholes[number].prompt_logprobs)
                    choice["prompt_logprobs"] = told
            await call.exchange.answer(
                head
                | {
                    "choices": answered,
                    "system_fingerprint": wholes[0].adapter_revision or None,
                    **counts_of(wholes),
                }
            )


def _prompts(value: Any) -> list[dict[str, Any]]:
    """Return each prompt as options of the SDK: a text or ids. Raises HttpError."""
    if value is None:
        raise invalid("prompt", "is required")
    if isinstance(value, str) or (value and isinstance(value[0], int)):
        value = [value]
    if not 1 <= len(value) <= _PROMPTS:
        raise invalid("prompt", f"{len(value)} prompts; 1 to {_PROMPTS} of them")
    return [{"prompt": one} if isinstance(one, str) else {"token_ids": one} for one in value]


async def _prompt_ids(
    call: HttpCall, prompts: Sequence[Mapping[str, Any]], named: Mapping[str, Any], options: Mapping[str, Any]
) -> list[Sequence[int]]:
    """Return the ids of each prompt. Raises LoraplexError."""
    special = options.get("add_special_tokens")
    return [
        prompt.get("token_ids") or await call.caller.tokenize(prompt["prompt"], add_special_tokens=special, **named)
        for prompt in prompts
    ]


async def _choice(
    index: int,
    texts: LogprobTexts | None,
    choice: Choice,
    prompt_ids: Sequence[int],
    prompt_logprobs: Sequence[TokenLogprobs],
) -> dict[str, Any]:
    logprobs = None
    if texts is not None:
        before = (None, *prompt_logprobs) if prompt_ids else ()
        logprobs = await texts.of_completion([*prompt_ids, *choice.token_ids], [*before, *choice.logprobs], 0)
    return {
        "index": index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": REASONS[choice.finish_reason],
    }


class _CompletionChunks(_Chunks):
    """The chunks of completions, merged from a stream for each prompt."""

    async def send(self, streams: Sequence[AsyncGenerationStream]) -> None:
        """Send the streams, merged. Raises LoraplexError."""
        exchange = self._call.exchange
        await self._begin(streams)
        async for number, piece in _merged(streams):
            if not exchange.status:
                await self._call.begin()
            self._tokens += len(piece.token_ids)
            if piece.finished is not None:
                self._wholes.append(self._call.finished(piece.finished))
            elif piece.ended is not None:
                index = number * self._n + piece.choice
                await exchange.write(self._event(index, "", REASONS[piece.ended.finish_reason]))
            elif piece.text or self._texts is not None:
                index = number * self._n + piece.choice
                await exchange.write(self._event(index, piece.text, None, await self._logprobs(index, piece)))
        usage = {**self._head, "choices": [], **counts_of(self._wholes)}
        await exchange.end((event(usage) if self._usage.last else b"") + DONE)

    def _event(self, index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return event({**self._head_now(), "choices": [choice]})

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
