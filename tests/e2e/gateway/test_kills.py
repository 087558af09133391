"""Kill -9 of a worker, then of a router, in mid-stream: every client gets the answer that it got without."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
import pytest
import pytest_asyncio
from huggingface_hub import AsyncInferenceClient

from loraplex.runtime.rpc.settings import is_installed
from tests.e2e.conftest import Cluster
from tests.e2e.gateway.conftest import HEADERS, MESSAGES, PROMPT, Eventually, expected
from tests.e2e.gateway.kills import kill_busiest_worker, router_of_moved

if TYPE_CHECKING:  # imported by the tests that need it: it takes seconds
    import anthropic

pytestmark = pytest.mark.asyncio(loop_scope="package")
TOKENS = 150
CITY = {"type": "string", "minLength": 600, "maxLength": 700}
SCHEMA: Any = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
CHAT: dict[str, Any] = {"messages": MESSAGES, "model": "a", "temperature": 0, "max_tokens": TOKENS}
CALLED: dict[str, Any] = {
    **CHAT,
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
}
SAID: dict[str, Any] = {"messages": MESSAGES, "model": "b", "max_tokens": TOKENS, "extra_body": {"temperature": 0}}
USED: dict[str, Any] = {
    **SAID,
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "weather"},
}
TOLD: dict[str, Any] = {"adapter_id": "c", "max_new_tokens": TOKENS}

# Reads an answer; returns what must be the same whatever dies.
Reader = Callable[[], Coroutine[Any, Any, Any]]


@dataclass
class Clients:
    """Real clients of the gateway, and the kinds of streams that they read."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    hub: AsyncInferenceClient

    @property
    def streams(self) -> list[Reader]:
        found: list[Reader] = [self.chat, self.calls, self.prompts, self.said, self.used, self.generated]
        return [*found, self.lorax] if is_installed("lorax") else found

    async def chat(self) -> Any:
        """Read two choices with their log probabilities."""
        texts, chances, reasons, usage = ["", ""], list[float](), dict[int, str](), None
        async for chunk in await self.openai.chat.completions.create(
            **CHAT, n=2, stream=True, logprobs=True, stream_options={"include_usage": True}
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                chances += [one.logprob for one in (choice.logprobs and choice.logprobs.content) or ()]
                if choice.finish_reason:
                    assert choice.index not in reasons
                    reasons[choice.index] = choice.finish_reason
            usage = chunk.usage
        assert usage is not None
        return texts, sorted(chances), reasons, usage.completion_tokens

    async def calls(self) -> Any:
        """Read two choices, each a call of a tool."""
        calls: dict[tuple[int, int], str] = {}
        async for chunk in await self.openai.chat.completions.create(**CALLED, n=2, stream=True):
            for choice in chunk.choices:
                for part in choice.delta.tool_calls or ():
                    assert part.function is not None
                    said = (part.function.name or "") + (part.function.arguments or "")
                    calls[choice.index, part.index] = calls.get((choice.index, part.index), "") + said
        return calls

    async def prompts(self) -> Any:
        """Read the answers to two prompts."""
        texts = [""] * 2
        async for chunk in await self.openai.completions.create(
            model="c", prompt=["x", "y"], temperature=0, max_tokens=TOKENS, stream=True
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        return texts

    async def said(self) -> Any:
        """Read a message of text."""
        return await self._message(SAID)

    async def used(self) -> Any:
        """Read a message that uses a tool."""
        return await self._message(USED)

    async def _message(self, asked: dict[str, Any]) -> Any:
        async with self.anthropic.messages.stream(**asked) as stream:
            message = await stream.get_final_message()
        content = [block.model_dump(exclude={"id"}) for block in message.content]
        return content, message.stop_reason, message.usage.output_tokens

    async def generated(self) -> Any:
        """Read TGI's stream."""
        return await _tokens(await self.hub.text_generation(PROMPT, **TOLD, stream=True, details=True))

    async def lorax(self) -> Any:
        """Read LoRAX's stream with its own client."""
        from lorax import AsyncClient

        return await _tokens(AsyncClient(self.hub.model, headers=HEADERS).generate_stream(PROMPT, **TOLD))

    async def wholes(self) -> Any:
        """Read answers that are no streams."""
        chat, message, text = await asyncio.gather(
            self.openai.chat.completions.create(**CHAT),
            self.anthropic.messages.create(**SAID),
            self.hub.text_generation(PROMPT, **TOLD),
        )
        said = [block.text for block in message.content if block.type == "text"]
        return chat.choices[0].message.content, said, text


async def _tokens(stream: AsyncIterator[Any]) -> Any:
    ids, text, whole = list[int](), "", None
    async for one in stream:
        ids.append(one.token.id)
        text += one.token.text
        whole = one.generated_text
    return ids, text, whole


@pytest_asyncio.fixture(loop_scope="package")
async def clients(cluster: Cluster, client: openai.AsyncOpenAI) -> AsyncIterator[Clients]:
    import anthropic

    url = f"http://{cluster.local.http}"
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key="none", default_headers=HEADERS, max_retries=0) as claude,
        AsyncInferenceClient(url, headers=HEADERS) as hub,
    ):
        yield Clients(client, claude, hub)


async def test_answers_are_the_same_where_a_worker_and_a_router_were_killed(
    clients: Clients, cluster: Cluster, eventually: Eventually
) -> None:
    undisturbed = await asyncio.gather(*(read() for read in (*clients.streams, clients.wholes)))
    texts = [expected(PROMPT, cluster.digests["a"], TOKENS, choice=choice) for choice in range(2)]
    assert (undisturbed[0][0], undisturbed[-1][0]) == (texts, texts[0])
    assert [said.startswith('weather{"city"') for said in undisturbed[1].values()] == [True, True]

    reading = [asyncio.create_task(read()) for read in (*clients.streams, clients.wholes)]
    await kill_busiest_worker(cluster)
    moved = asyncio.create_task(router_of_moved(cluster))
    while not moved.done() and any(not one.done() for one in reading):
        await asyncio.wait([moved, *(one for one in reading if not one.done())], return_when=asyncio.FIRST_COMPLETED)
    router = moved.result() if moved.done() else "router-1"  # on a busy machine all may have ended before anybody looks
    moved.cancel()
    cluster.local.kill(router, signal.SIGKILL)
    assert await asyncio.gather(*reading) == undisturbed
    await cluster.local.restart(router)
    await cluster.local.wait_serving()
    await eventually(cluster.idle)
