"""A content hook at every door of a cluster: prompts, answers in mid-stream, a hook that hangs, a router that dies."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio

from loraplex_client import AsyncClient, FinishReason, Generation, InvalidRequestError, Question, UnavailableError
from tests.content_hook import REASON, ContentHook, serving_hook
from tests.e2e.conftest import TENANT, Cluster, jobs, running_cluster, write_hash_adapters
from tests.plans_file import set_plans

pytestmark = pytest.mark.asyncio(loop_scope="module")
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

MODEL = "hash:?vocab=32000&seed=1&step_ms=5"
WORD = "forbidden"
TOKENS = 150
# Of an answer in three or four parts.
FEW = 80
HEADERS = {"x-loraplex-tenant": TENANT}
PROMPT = "Tell me"
CHAT: Any = [{"role": "user", "content": PROMPT}]
# Asks a gateway, whole or as a stream; returns the text, the reason of its end, and why it was refused.
Ask = Callable[[str, bool], Awaitable[tuple[str, str | None, str | None]]]


@dataclass(frozen=True)
class Hooked:
    """A cluster of two routers and a gateway, its hook, and a client of both routers."""

    cluster: Cluster
    hook: ContentHook
    client: AsyncClient


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hooked]:
    directory = tmp_path_factory.mktemp("hooks")
    adapters = write_hash_adapters(directory / "adapters")
    async with serving_hook() as hook:
        flags = ("--content-hook", f"grpc://{hook.address}?timeout_ms=2000&fail=closed")
        async with (
            running_cluster(
                directory / "cluster", MODEL, adapters, workers=2, routers=2, http=True, router_flags=flags
            ) as cluster,
            AsyncClient(cluster.local.routers, TENANT, resume_attempts=100) as client,
        ):
            yield Hooked(cluster, hook, client)


@pytest.fixture
def hooked(running: Hooked) -> Hooked:
    """The cluster, with a hook that allows all."""
    running.hook.word = ""
    running.hook.goes_on.set()
    running.hook.asked.clear()
    return running


def answer_of(generation: Generation) -> Any:
    return [replace(choice, logprobs=()) for choice in generation.choices]


def is_cut(text: str, truth: str, word: str) -> bool:
    """Tell whether a text is the beginning of an answer, and ends in front of a word of it."""
    return truth.startswith(text) and 0 < len(text) <= truth.index(word)


async def test_prompts_are_refused_at_every_door_ahead_of_the_queue(hooked: Hooked, eventually: Eventually) -> None:
    hooked.hook.word = WORD
    prompt = f"Say {WORD}"
    chat: Any = [{"role": "user", "content": prompt}]
    await set_plans(hooked.cluster.local.store, "[tenants.counted]\nrequests_per_minute = 1\n")
    async with AsyncClient(hooked.cluster.local.router, "counted") as counted:
        calls: list[Callable[[], Any]] = [
            lambda: counted.generate(prompt, max_tokens=2),
            lambda: counted.generate(token_ids=[*prompt.encode()], max_tokens=2),
            lambda: counted.generate(messages=chat, max_tokens=2),
            lambda: counted.score(prompt, ["a"]),
            lambda: counted.score("Say", [f" {WORD}"]),
            lambda: counted.decide(prompt, [Question("So?")]),
            lambda: counted.decide("Say", [Question("So?"), Question(f"Is it {WORD}?")]),
            lambda: counted.rerank(prompt, ["a"], yes="y", no="n"),
            lambda: counted.rerank("Say", ["a", prompt], yes="y", no="n"),
            lambda: counted.embed([prompt]),
            lambda: counted.classify([prompt]),
        ]
        for call in calls:
            with pytest.raises(InvalidRequestError, match=REASON) as refused:
                await call()
            assert refused.value.reason == "CONTENT_REFUSED"
        assert await jobs(hooked.cluster) == []
        await counted.generate("Hello", max_tokens=2)  # none of these counted
        url = f"http://{hooked.cluster.local.http}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", default_headers=HEADERS, max_retries=0) as http:
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError, match=REASON) as answered:
                    await http.chat.completions.create(model="a", messages=chat, max_tokens=2, stream=stream)
                assert answered.value.code == "content_refused"
    await eventually(hooked.cluster.idle)


async def test_an_answer_passes_in_parts(hooked: Hooked) -> None:
    options: dict[str, Any] = {"adapter_id": "a", "max_tokens": TOKENS, "n": 2, "temperature": 0.7, "seed": 3}
    whole = await hooked.client.generate("prompt", request_id="passes", **options)
    assert [choice.finish_reason for choice in whole.choices] == [FinishReason.LENGTH] * 2
    texts = [hooked.hook.text_of("passes", choice) for choice in range(2)]
    assert texts == [choice.text for choice in whole.choices]
    assert len([part for part in hooked.hook.parts if part.call.request_id == "passes"]) > 4


async def test_an_answer_is_refused_in_mid_stream(hooked: Hooked, eventually: Eventually) -> None:
    options: dict[str, Any] = {"adapter_id": "b", "max_tokens": 2_000}
    truth = await hooked.client.generate("prompt", **{**options, "max_tokens": TOKENS})
    hooked.hook.word = f"<{truth.token_ids[TOKENS // 2]}>"
    cut = await hooked.client.generate("prompt", request_id="cut", **options)
    assert (cut.finish_reason, cut.choices[0].refusal) == (FinishReason.CONTENT_FILTER, REASON)
    assert is_cut(cut.text, truth.text, hooked.hook.word)
    assert cut.text == hooked.hook.text_of("cut")
    # What was computed for the part that was refused is told too; the rest is not computed.
    assert len(cut.token_ids) < cut.usage.completion_tokens < 2_000
    url = f"http://{hooked.cluster.local.http}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", default_headers=HEADERS, max_retries=0) as http:
        whole = await http.completions.create(model="b", prompt="prompt", max_tokens=2_000, temperature=0)
        assert is_cut(whole.choices[0].text, truth.text, hooked.hook.word)
        assert whole.choices[0].finish_reason == "content_filter"
        streamed = await http.completions.create(
            model="b", prompt="prompt", max_tokens=2_000, temperature=0, stream=True
        )
        chunks = [chunk.choices[0] async for chunk in streamed if chunk.choices]
        assert is_cut("".join(chunk.text for chunk in chunks), truth.text, hooked.hook.word)
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["content_filter"]
    await eventually(hooked.cluster.idle)


async def openais(url: str, stream: bool) -> tuple[str, str | None, str | None]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", default_headers=HEADERS, max_retries=0) as http:
        asked: Any = {"model": "a", "messages": CHAT, "max_tokens": FEW, "temperature": 0}
        if not stream:
            (choice,) = (await http.chat.completions.create(**asked)).choices
            return choice.message.content or "", choice.finish_reason, choice.message.refusal
        chunks = [chunk async for chunk in await http.chat.completions.create(**asked, stream=True)]
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text = "".join(one.delta.content or "" for one in deltas)
    return text, deltas[-1].finish_reason, deltas[-1].delta.refusal


async def responses(url: str, stream: bool) -> tuple[str, str | None, str | None]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", default_headers=HEADERS, max_retries=0) as http:
        asked: Any = {"model": "a", "input": PROMPT, "max_output_tokens": FEW, "temperature": 0}
        if stream:
            events = [event async for event in await http.responses.create(**asked, stream=True)]
            last: Any = events[-1]
            assert last.type == f"response.{last.response.status}"
            told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert told == last.response.output_text
            answer = last.response
        else:
            answer = await http.responses.create(**asked)
    cut = answer.incomplete_details.reason if answer.incomplete_details else None
    assert (answer.status, answer.output[-1].status) == ("incomplete", "incomplete")
    return answer.output_text, cut, None


async def anthropics(url: str, stream: bool) -> tuple[str, str | None, str | None]:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=url, api_key="none", default_headers=HEADERS, max_retries=0) as http:
        asked: Any = {"model": "a", "messages": CHAT, "max_tokens": FEW, "extra_body": {"temperature": 0}}
        if stream:
            async with http.messages.stream(**asked) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await http.messages.create(**asked)
    text = "".join(block.text for block in answer.content if block.type == "text")
    return text, answer.stop_reason, answer.stop_details.explanation if answer.stop_details else None


async def tgis(url: str, stream: bool) -> tuple[str, str | None, str | None]:
    asked: Any = {"inputs": PROMPT, "parameters": {"adapter_id": "a", "max_new_tokens": FEW, "details": True}}
    async with httpx2.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as http:
        path = "/generate_stream" if stream else "/generate"
        answer = (await http.post(path, json=asked)).raise_for_status()
    if not stream:
        told = answer.json()
        assert len(told["details"]["tokens"]) == told["details"]["generated_tokens"]
        return told["generated_text"], told["details"]["finish_reason"], None
    told = [json.loads(line.removeprefix("data:")) for line in answer.text.splitlines() if line.startswith("data:")]
    assert "".join(one["token"]["text"] for one in told) == told[-1]["generated_text"]
    return told[-1]["generated_text"], told[-1]["details"]["finish_reason"], None


@pytest.mark.parametrize(
    ("ask", "whole", "cut", "why"),
    [
        (openais, "length", "content_filter", REASON),
        (responses, "max_output_tokens", "content_filter", None),
        (anthropics, "max_tokens", "refusal", REASON),
        (tgis, "length", "stop_sequence", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_each_protocol_says_that_an_answer_was_refused(
    hooked: Hooked, ask: Ask, whole: str, cut: str, why: str | None, stream: bool
) -> None:
    url = f"http://{hooked.cluster.local.http}"
    truth, reason, told = await ask(url, stream)
    assert (reason, told) == (whole, None)
    hooked.hook.word = f"<{re.findall(r'<([0-9]+)>', truth[3 * len(truth) // 4 :])[0]}>"
    text, reason, told = await ask(url, stream)
    assert is_cut(text, truth, hooked.hook.word)
    assert (reason, told) == (cut, why)
    hooked.hook.word = truth[:5]  # nothing has passed
    assert await ask(url, stream) == ("", cut, why)


async def test_an_answer_whose_router_is_killed_is_cut_in_front_of_the_same_word(hooked: Hooked) -> None:
    options: dict[str, Any] = {"adapter_id": "c", "max_tokens": 4 * TOKENS}
    truth = await hooked.client.generate("prompt", **options)
    hooked.hook.word = f"<{truth.token_ids[-20]}>"
    names = [f"resumed-{number}" for number in range(8)]
    begun, all_begun = set[str](), asyncio.Event()

    async def read(name: str) -> Generation:
        async for piece in hooked.client.generate_stream("prompt", request_id=name, **options):
            begun.add(name)
            if len(begun) == len(names):
                all_begun.set()
            if piece.finished:
                return piece.finished
        raise AssertionError("no end")

    reads = [asyncio.create_task(read(name)) for name in names]
    await all_begun.wait()
    hooked.cluster.local.kill("router-1", signal.SIGKILL)
    answers = await asyncio.gather(*reads)
    assert any(answer.continuations for answer in answers)
    for name, answer in zip(names, answers, strict=True):
        assert answer.finish_reason is FinishReason.CONTENT_FILTER
        assert is_cut(answer.text, truth.text, hooked.hook.word)
        assert hooked.hook.text_of(name) == answer.text
    await hooked.cluster.local.restart("router-1")
    await hooked.cluster.local.wait_serving()


async def test_a_hook_that_hangs_refuses_prompts_and_pauses_answers(hooked: Hooked) -> None:
    options: dict[str, Any] = {"adapter_id": "a", "max_tokens": TOKENS}
    truth = await hooked.client.generate("prompt", **options)
    stream = hooked.client.generate_stream("prompt", **options)
    await anext(stream)
    hooked.hook.goes_on.clear()
    hooked.hook.asked.clear()
    async with AsyncClient(hooked.cluster.local.router, TENANT, resume_attempts=0) as once:
        with pytest.raises(UnavailableError, match="the content hook does not answer") as away:
            await once.generate("prompt", max_tokens=2)
    assert away.value.reason == "CONTENT_HOOK_AWAY"
    hooked.hook.goes_on.set()
    assert answer_of(await stream.result()) == answer_of(truth)
