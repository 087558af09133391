"""The whole path with real float32 models: token ids equal transformers' generate with peft's adapter, each alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.conftest import Cluster, running_cluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.model]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

FLOAT32 = ("--dtype", "float32", "--threads", "1", "--block-size", "8")
# Few blocks and a small step: prompts are cut in chunks, and sequences preempted.
SMALL = (*FLOAT32, "--kv-blocks", "40", "--step-tokens", "24", "--rows", "8")
NAMES = ("plain", "patterned", "rslora", None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Any) -> AsyncIterator[Cluster]:
    """A cluster of one worker with little room."""
    directory, model = tmp_path_factory.mktemp("small"), str(tiny_llama.directory)
    async with running_cluster(directory, model, tiny_llama.adapters, worker_flags=SMALL) as running:
        yield running


def prompt(number: int) -> tuple[int, ...]:
    """Uneven lengths, from 3 to 90 tokens."""
    return tuple(3 + (number * 31 + at * 7) % 300 for at in range(3 + number * 29 % 88))


async def test_twelve_requests_with_three_adapters_are_exact(
    small: Cluster, eventually: Eventually, tiny_llama: Any
) -> None:
    tokens_seen = 0
    arrived = asyncio.Condition()

    async def ask(number: int) -> tuple[int, ...]:
        nonlocal tokens_seen
        async with arrived:  # each comes later than the one before, while others are decoding
            await arrived.wait_for(lambda: tokens_seen >= number * 5 or number == 0)
        got: list[int] = []
        options: dict[str, Any] = {
            "token_ids": prompt(number),
            "adapter_id": NAMES[number % 4],
            "max_new_tokens": 10 + number * 4,
        }
        async for piece in small.client.generate_stream(**options):
            got += piece.token_ids
            async with arrived:
                tokens_seen += len(piece.token_ids)
                arrived.notify_all()
        async with arrived:  # whoever ends early must not hold up the rest
            tokens_seen += 1000
            arrived.notify_all()
        return tuple(got)

    answers = await asyncio.gather(*(ask(number) for number in range(12)))
    for number, answer in enumerate(answers):
        assert answer == tiny_llama.answer(prompt(number), 10 + number * 4, NAMES[number % 4]), number
    assert len({answer[:6] for answer in answers}) >= 10, "the answers are not diverse"
    same = {tiny_llama.answer(prompt(0), 20, name) for name in NAMES}
    assert len(same) == 4, "the adapters do not matter"
    await eventually(small.idle)
