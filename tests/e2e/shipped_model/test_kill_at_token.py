"""A real model in float32 whose engine is killed at a certain token: every answer is the undisturbed one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from loraplex_client import AsyncGenerationStream, Choice, Generation

from tests.e2e.conftest import Cluster

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.model]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

TOKENS = 56
DRAWN = {"temperature": 0.8, "top_p": 0.95, "top_k": 200, "repetition_penalty": 1.2, "frequency_penalty": 0.4}
ASKS: tuple[dict[str, Any], ...] = (
    {"prompt": "The function returns", "adapter_id": "shout", **DRAWN, "seed": 11, "logprobs": 2},
    {"prompt": "A list of", "adapter_id": "json", **DRAWN, "seed": 12, "n": 2},
    {"prompt": "Open the file", "adapter_id": "pirate", "temperature": 1.0, "presence_penalty": 0.7, "seed": 13},
    {"prompt": "Return", "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"prompt": "Close the", "adapter_id": "shout", "temperature": 0.9, "seed": 14, "n": 1, "best_of": 3, "logprobs": 2},
)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def undisturbed(cluster: Cluster) -> list[tuple[dict[str, Any], Generation]]:
    """The requests, each with its answer; all but the last end at a stop string that lies near the end of it."""
    pairs = []
    for ask in ASKS:
        options = {**ask, "max_new_tokens": TOKENS, "ignore_eos": True}
        answer = await cluster.client.generate(**options)
        if ask is not ASKS[-1]:
            options["stop"] = [_late(answer.text)]
            answer = await cluster.client.generate(**options)
            assert answer.stop == options["stop"][0]
        assert len(answer.token_ids) > 35
        pairs.append((options, answer))
    assert len({answer.token_ids for _, answer in pairs}) == len(ASKS)
    return pairs


def _late(text: str) -> str:
    """A string that the text comes to for the first time shortly before its end."""
    return next(stop for at in range(len(text) - 12, 0, -1) if text.find(stop := text[at : at + 8]) == at)


async def read(stream: AsyncGenerationStream, k: int, reached: asyncio.Event) -> Generation:
    count = 0
    async for piece in stream:
        count += len(piece.token_ids)
        if count >= k:
            reached.set()
        if piece.finished:
            return piece.finished
    raise AssertionError("no end")


def check(choice: Choice, truth: Choice) -> None:
    """Check that two choices are equal, but for the log probabilities' last digits: another batch rounds otherwise."""
    for name in ("token_ids", "text", "finish_reason", "stop"):
        assert getattr(choice, name) == getattr(truth, name)
    for logprob, true in zip(choice.logprobs, truth.logprobs, strict=True):
        assert logprob.alternatives[0][0] == true.alternatives[0][0]
        assert logprob.logprob == pytest.approx(true.logprob, abs=1e-3)


# Both in one test, so that they share a cluster: each start of an engine takes seconds of torch's imports.
@pytest.mark.timeout(240)
async def test_the_answers_are_the_undisturbed_run_s(
    cluster: Cluster, undisturbed: list[tuple[dict[str, Any], Generation]], eventually: Eventually
) -> None:
    for k in (1, 31):
        await kill_at(k, cluster, undisturbed)
        await eventually(cluster.idle)


async def kill_at(k: int, cluster: Cluster, undisturbed: list[tuple[dict[str, Any], Generation]]) -> None:
    """Ask again, kill the engine at token `k` of the first request, and compare what the next engine goes on with."""
    # Known beforehand, since an answer takes only a few hundred milliseconds.
    (worker,) = await cluster.workers()
    reached = asyncio.Event()
    first, *rest = [
        cluster.client.generate_stream(**options, request_id=f"{k}-{number}")
        for number, (options, _) in enumerate(undisturbed)
    ]
    reading = [asyncio.create_task(read(first, k, reached))]
    reading += [asyncio.create_task(read(stream, TOKENS, asyncio.Event())) for stream in rest]
    async with asyncio.timeout(60):
        await reached.wait()
        os.kill(worker.engine_pid, signal.SIGKILL)
        answers = await asyncio.gather(*reading)
    assert answers[0].continuations > 0, "its engine lived"
    for answer, (_, truth) in zip(answers, undisturbed, strict=True):
        for choice, true in zip(answer.choices, truth.choices, strict=True):
            check(choice, true)
