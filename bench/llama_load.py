"""The requests of bench.llama, and the client that sends them: the same completions to every server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.http_load import connected
from bench.rounds import Timed
from bench.workload import Request, answered_tokens

PAGES = Path(__file__).parents[1] / "docs"
# Maximum times that a request is sent. llama.cpp's server closes a new connection unanswered now and then.
_ATTEMPTS = 5


@dataclass(frozen=True)
class Server:
    """A server's address, and its own fields of a request to the base, and of one to each adapter."""

    address: str
    base: Mapping[str, Any]
    adapters: Sequence[Mapping[str, Any]]

    def body(self, request: Request) -> dict[str, Any]:
        """Return the body of a request."""
        own = self.base if request.adapter is None else self.adapters[request.adapter]
        wanted = {"max_tokens": request.tokens, "ignore_eos": True, "stream_options": {"include_usage": True}}
        return {"prompt": request.prompt_ids, **wanted, **own}


@dataclass(frozen=True)
class Work:
    """A kind of requests: tokens of a prompt, adapters that they use in turn, requests at once and in all.

    `tokens` are those of an answer, `rounds` how often such requests are timed.
    """

    prompt: int
    adapters: int
    at_once: int
    requests: int
    tokens: int
    rounds: int

    @property
    def name(self) -> str:
        """Return what tells this work from others."""
        adapters = {0: "base", 1: "one adapter"}.get(self.adapters, f"{self.adapters} adapters")
        return f"{adapters}, {self.at_once} at once, prompts of {self.prompt:,}"

    def draw(self, text: Sequence[int], number: int) -> list[Request]:
        """Draw requests whose prompts are parts of a long text. Other numbers and other works give other prompts."""
        chance = random.Random(f"{self.name} {number}")
        starts = [chance.randrange(len(text) - self.prompt) for _ in range(self.requests)]
        return [
            Request(tuple(text[at : at + self.prompt]), self.tokens, index % self.adapters if self.adapters else None)
            for index, at in enumerate(starts)
        ]


@dataclass(frozen=True)
class Answered(Timed):
    """A run with the seconds to each request's first token, and the answers' texts, in the requests' order."""

    first_token_s: tuple[float, ...] = ()
    texts: tuple[str, ...] = field(default=(), repr=False)


def read_text(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the pages of docs."""
    pages = (page.read_text() for page in sorted(PAGES.rglob("*.md")))
    ids: list[int] = tokenizer.encode("\n".join(pages), add_special_tokens=False).ids
    return ids


async def send(server: Server, requests: Sequence[Request], at_once: int) -> Answered:
    """Send requests, so many at a time, and time them. Raises RuntimeError on an answer of another length."""
    waiting = iter(enumerate(requests))
    answers: dict[int, tuple[float, bytes]] = {}

    async def ask() -> None:
        for index, request in waiting:
            answers[index] = await _answer(server, request)

    start = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(at_once)))
    seconds = time.perf_counter() - start
    first_s, bodies = zip(*(answers[index] for index in range(len(requests))), strict=True)
    texts = (_text(body, request.tokens) for body, request in zip(bodies, requests, strict=True))
    return Answered(answered_tokens(requests), seconds, (), first_s, tuple(texts))


async def _answer(server: Server, request: Request) -> tuple[float, bytes]:
    """Send a request, again where the connection is closed unanswered; return as _ask does. Raises RuntimeError."""
    for _ in range(_ATTEMPTS):
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            return await _ask(server, request)
    raise RuntimeError(f"{server.address} closed {_ATTEMPTS} connections unanswered")


async def _ask(server: Server, request: Request) -> tuple[float, bytes]:
    """Return the seconds until an answer began, and its body as it came."""
    start = time.perf_counter()
    async with connected(server.address) as connection:
        parts = [(time.perf_counter() - start, data) async for data in connection.answer(server.body(request))]
    return parts[0][0], b"".join(data for _, data in parts)


def _text(body: bytes, tokens: int) -> str:
    """Return the text of an answer's events. Raises RuntimeError if it has not so many tokens."""
    events = list(_events(body))
    counted = next((event["usage"]["completion_tokens"] for event in reversed(events) if event.get("usage")), 0)
    if counted != tokens:
        raise RuntimeError(f"an answer has {counted} tokens, {tokens} were asked for")
    return "".join(choice["text"] for event in events for choice in event["choices"])


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON events of a chunked body."""
    content = bytearray()
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        content += rest[:length]
        body = rest[length + 2 :]
    for line in bytes(content).decode().split("\n"):
        data = line.removeprefix("data: ")
        if data not in (line, "[DONE]"):
            yield json.loads(data)


def agreement(tokenizer: Tokenizer, texts: Sequence[str], others: Sequence[str], tokens: int = 16) -> float:
    """Return the share of the first tokens, up to the first that differs, that answers have in common with others."""
    same = compared = 0
    for pair in zip(texts, others, strict=True):
        one, other = (tokenizer.encode(text, add_special_tokens=False).ids[:tokens] for text in pair)
        same += sum(1 for _ in takewhile(lambda ids: ids[0] == ids[1], zip(one, other, strict=False)))
        compared += max(len(one), len(other))
    return same / compared
