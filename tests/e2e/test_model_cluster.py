"""The whole path with real float32 models: token ids equal transformers' generate with peft's adapter, each alone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from loraplex_client import FailedPreconditionError, InvalidRequestError

from tests.e2e.conftest import Cluster, running_cluster
from tests.e2e.full_cluster import jobs

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


async def test_vectors_of_a_decoder_are_pooled_hidden_states(small: Cluster, tiny_llama: Any) -> None:
    """Beside an answer, over prompts of several chunks."""
    import torch

    texts = [prompt(number) for number in range(4)]
    poolings: tuple[Any, ...] = (None, "mean")
    found, answer = await asyncio.gather(
        asyncio.gather(
            *(small.client.embed(texts, adapter_id="plain", pooling=one, normalize=False) for one in poolings)
        ),
        small.client.generate(token_ids=prompt(1), max_new_tokens=20),
    )
    assert answer.token_ids == tiny_llama.answer(prompt(1), 20, None)
    tiny_llama.peft.set_adapter("plain")
    for at, ids in enumerate(texts):
        with torch.inference_mode():
            hidden = tiny_llama.peft(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].float()
        for vectors, expected in zip(found, (hidden[-1], hidden.mean(0)), strict=True):
            assert torch.allclose(torch.tensor(vectors.vectors[at]), expected, atol=1e-4), at
    with pytest.raises(InvalidRequestError, match="the first token of a decoder sees no other; use last or mean"):
        await small.client.embed(texts, pooling="cls")
    with pytest.raises(FailedPreconditionError, match="has no classification head"):
        await small.client.classify(texts)


async def test_a_sum_of_real_adapters_is_pefts(small: Cluster, tiny_llama: Any) -> None:
    """In one batch with its parts; the sum is never merged into anything."""
    weights = {"plain": 0.75, "patterned": -1.5}
    tiny_llama.peft.add_weighted_adapter([*weights], [*weights.values()], "their sum", combination_type="cat")
    try:

        async def ask(number: int, **options: Any) -> tuple[tuple[int, ...], str | None]:
            prompt = tuple(3 + (number * 41 + at * 11) % 300 for at in range(3 + number * 5))
            answer = await small.client.generate(token_ids=prompt, max_new_tokens=16, **options)
            name = "their sum" if "adapters" in options else options["adapter_id"]
            assert answer.token_ids == tiny_llama.answer(prompt, 16, name)
            return answer.token_ids, name

        kinds: list[dict[str, Any]] = [{"adapters": weights}, {"adapter_id": "plain"}, {"adapter_id": "patterned"}]
        answers = await asyncio.gather(*(ask(number, **kinds[number % 3]) for number in range(9)))
        assert len({ids[:6] for ids, _ in answers}) == len(answers), "the answers are not diverse"
    finally:
        tiny_llama.peft.delete_adapter("their sum")


async def test_killing_a_worker_in_mid_stream_changes_no_token(
    small: Cluster, eventually: Eventually, tiny_llama: Any
) -> None:
    """Add a worker, and kill the first one while both have streams, more than they have memory for."""
    await small.local.processes[await small.local.start_worker()].wait_ready()

    async def ask(number: int) -> int:
        got: list[int] = []
        continuations = 0
        options: dict[str, Any] = {"token_ids": prompt(number), "adapter_id": NAMES[number % 4], "max_new_tokens": 100}
        async for piece in small.client.generate_stream(**options):
            assert piece.offset == len(got)
            got += piece.token_ids
            if piece.finished:
                continuations = piece.finished.continuations
        assert tuple(got) == tiny_llama.answer(prompt(number), 100, NAMES[number % 4]), number
        return continuations

    async def busy() -> set[str]:
        """Return the workers that have streams in their middle, as the router knows without delay."""
        return {job.worker_id for job in await jobs(small) if job.completion_tokens >= 10}

    asks: list[asyncio.Task[int]] = []
    async with asyncio.timeout(60):
        while len(await busy()) < 2:  # the router counts
            if all(one.done() for one in asks):  # one worker may have taken all of them
                await asyncio.gather(*asks)
                asks = [asyncio.create_task(ask(number)) for number in range(14)]
            await asyncio.sleep(0.005)
    small.local.kill("worker-1", signal.SIGKILL)
    assert sum(await asyncio.gather(*asks)) > 0, "the killed worker held nothing"
    await eventually(small.idle)
