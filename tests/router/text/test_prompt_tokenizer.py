"""Prompts to ids: checked before they are tokenized, long ones in turns of the tenants and off the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from loraplex.router.request import Chat, ChatMessage
from loraplex.router.text.chat import ChatTemplate
from loraplex.router.text.tokenizer import SHORT_CHARACTERS, SHORT_IDS, HashTokenizer, PromptTokenizer
from loraplex.runtime.rpc.errors import InvalidField

LONG = "x" * (SHORT_CHARACTERS + 1)


class WatchedText(HashTokenizer):
    """A text that notes what is tokenized, and tokenizes long texts once `go` is set."""

    def __init__(self) -> None:
        self.longest_token = 4
        self.go = threading.Event()
        self.begun: list[str] = []
        # Released once for each text that is begun.
        self.beginnings = threading.Semaphore(0)
        self.threads: set[threading.Thread] = set()

    def tokenize(self, text: str, *, special_tokens: bool, limit: int | None = None) -> list[int]:
        self.begun.append(text)
        self.beginnings.release()
        self.threads.add(threading.current_thread())
        if len(text) > SHORT_CHARACTERS:
            assert self.go.wait(60)
        return super().tokenize(text, special_tokens=special_tokens, limit=limit)


@pytest.fixture
def text() -> WatchedText:
    return WatchedText()


async def encoded(
    text: Any, prompt: str, tenant: str = "acme", *, encoder: PromptTokenizer, context: int = 9999
) -> int:
    return len(await encoder.tokenize(text, prompt, "prompt", tenant, context))


async def test_a_chat_whose_template_makes_no_text_is_refused(text: WatchedText) -> None:
    encoder, chat = PromptTokenizer(1), Chat((ChatMessage("user", "Hi"),))
    try:
        with pytest.raises(InvalidField, match="makes no text of them") as refused:
            await encoder.tokenize_chat(text, ChatTemplate("{{ 'x' | attr('__class__') }}"), chat, "acme", 99, 0.0)
        assert refused.value.field == "chat.messages"
        with pytest.raises(InvalidField, match="99 tokens; more than 396 characters of text do not") as refused:
            await encoder.tokenize_chat(text, ChatTemplate("{{ 'x' * 999 }}"), chat, "acme", 99, 0.0)
        assert (refused.value.field, refused.value.reason) == ("chat.messages", "CONTEXT_EXCEEDED")
    finally:
        encoder.close()


async def test_a_text_beyond_the_context_is_refused_before_it_is_tokenized(text: WatchedText) -> None:
    encoder = PromptTokenizer(1)
    for prompt in ("x" * 401, "é" * 201, "🦊" * 101):
        with pytest.raises(InvalidField, match=r"length is 100 tokens; \d+ bytes of text do") as refused:
            await encoded(text, prompt, encoder=encoder, context=100)
        assert (refused.value.field, refused.value.reason) == ("prompt", "CONTEXT_EXCEEDED")
    assert text.begun == []
    for prompt in ("x" * 400, "é" * 200, "🦊" * 100):  # at most 100 tokens of 4 bytes, as far as the bound can tell
        with pytest.raises(InvalidField, match="length is 100 tokens; 400 tokens do not fit"):
            await encoded(text, prompt, encoder=encoder, context=100)
    assert len(text.begun) == 3


async def test_ids_beyond_the_context_are_refused(text: WatchedText) -> None:
    with pytest.raises(InvalidField, match=r"token_ids: .+ 101 tokens"):
        await PromptTokenizer(1).tokenize(text, (1,) * 101, "token_ids", "acme", 100)


async def test_a_short_prompt_waits_for_no_long_one_and_a_long_one_not_for_another_tenant_s_flood(
    text: WatchedText,
) -> None:
    encoder = PromptTokenizer(2)
    flood = [asyncio.create_task(encoded(text, LONG, "loud", encoder=encoder)) for _ in range(5)]
    quiet = asyncio.create_task(encoded(text, LONG + "quiet", "quiet", encoder=encoder))
    for _ in range(2):
        assert await asyncio.to_thread(text.beginnings.acquire, timeout=10)
    assert sorted(text.begun) == [LONG, LONG + "quiet"]  # the loud tenant has one of the two threads
    assert await encoded(text, "short", "quiet", encoder=encoder) == 5
    text.go.set()
    assert await asyncio.gather(*flood, quiet) == [len(LONG)] * 5 + [len(LONG) + 5]
    assert threading.current_thread() in text.threads  # the short one
    assert len(text.threads) == 3


async def test_a_caller_that_leaves_does_not_free_the_thread_that_works_for_it(text: WatchedText) -> None:
    encoder = PromptTokenizer(1)
    leaving = asyncio.create_task(encoded(text, LONG, encoder=encoder))
    assert await asyncio.to_thread(text.beginnings.acquire, timeout=10)
    leaving.cancel()
    staying = asyncio.create_task(encoded(text, LONG + "y", encoder=encoder))
    await asyncio.wait({leaving})
    assert text.begun == [LONG]
    text.go.set()
    assert await staying == len(LONG) + 1


async def test_work_on_many_ids_takes_a_turn_and_on_few_none() -> None:
    encoder = PromptTokenizer(1)
    assert await encoder.run("acme", SHORT_IDS, threading.current_thread) is threading.current_thread()
    assert await encoder.run("acme", SHORT_IDS + 1, threading.current_thread) is not threading.current_thread()
