"""The whole path with real float32 models: token ids equal transformers' generate with peft's adapter, each alone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

FLOAT32 = ("--dtype", "float32", "--threads", "1")
NAMES = ("plain", "patterned", "rslora", None)


def prompt(number: int) -> tuple[int, ...]:
    """Uneven lengths, from 3 to 90 tokens."""
    return tuple(3 + (number * 31 + at * 7) % 300 for at in range(3 + number * 29 % 88))


@pytest.mark.model
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
async def test_twelve_requests_with_three_adapters_are_exact(
    start_cluster: StartCluster, eventually: Eventually, request: pytest.FixtureRequest, architecture: str
) -> None:
    tiny = request.getfixturevalue(f"tiny_{architecture}")
    # Few blocks and a small step: prompts are cut in chunks, and sequences preempted.
    flags = (*FLOAT32, "--kv-blocks", "40", "--block-size", "8", "--step-tokens", "24", "--rows", "8")
    async with start_cluster(str(tiny.directory), tiny.adapters, worker_flags=flags) as cluster:
        tokens_seen = 0
        arrived = asyncio.Condition()

        async def ask(number: int) -> tuple[int, ...]:
            nonlocal tokens_seen
            async with arrived:  # each comes later than the one before, while others are decoding
                await arrived.wait_for(lambda: tokens_seen >= number * 5 or number == 0)
            got: list[int] = []
            options = {"token_ids": prompt(number), "adapter_id": NAMES[number % 4], "max_new_tokens": 10 + number * 4}
            async for piece in cluster.client.generate_stream(**options):
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
            assert answer == tiny.answer(prompt(number), 10 + number * 4, NAMES[number % 4]), number
        assert len({answer[:6] for answer in answers}) >= 10, "the answers are not diverse"
        same = {tiny.answer(prompt(0), 20, name) for name in NAMES}
        assert len(same) == 4, "the adapters do not matter"
        await eventually(cluster.idle)


@pytest.mark.model
async def test_killing_a_worker_in_mid_stream_changes_no_token(
    start_cluster: StartCluster, eventually: Eventually, tiny_llama: Any
) -> None:
    flags = (*FLOAT32, "--rows", "4", "--kv-blocks", "200", "--block-size", "8")
    async with start_cluster(str(tiny_llama.directory), tiny_llama.adapters, workers=2, worker_flags=flags) as cluster:
        # One worker has rows for four: with five streams in their middle both hold some.
        enough = asyncio.Event()
        in_the_middle: set[int] = set()

        async def ask(number: int) -> int:
            got: list[int] = []
            continuations = 0
            options = {"token_ids": prompt(number), "adapter_id": NAMES[number % 4], "max_new_tokens": 120}
            async for piece in cluster.client.generate_stream(**options):
                assert piece.offset == len(got)
                got += piece.token_ids
                if len(got) >= 10:
                    in_the_middle.add(number)
                if piece.finished:
                    in_the_middle.discard(number)
                    continuations = piece.finished.continuations
                if len(in_the_middle) >= 5:
                    enough.set()
            assert tuple(got) == tiny_llama.answer(prompt(number), 120, NAMES[number % 4]), number
            return continuations

        asks = asyncio.gather(*(ask(number) for number in range(12)))
        await enough.wait()
        cluster.local.kill("worker-1", signal.SIGKILL)
        assert sum(await asks) > 0, "the killed worker held nothing"
        await eventually(cluster.idle)


@pytest.mark.model
async def test_killing_a_worker_changes_no_draw(
    start_cluster: StartCluster, eventually: Eventually, tiny_llama: Any
) -> None:
    """Seeded sampling with penalties, logprobs, and the best of three: as the same requests gave undisturbed."""
    sampling = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 2}
    flags = (*FLOAT32, "--rows", "6", "--kv-blocks", "240", "--block-size", "8")
    async with start_cluster(str(tiny_llama.directory), tiny_llama.adapters, workers=2, worker_flags=flags) as cluster:

        def stream(number: int) -> Any:
            choices = {"n": 1, "best_of": 3} if number % 4 == 3 else {}
            return cluster.client.generate_stream(
                token_ids=prompt(number), adapter_id=NAMES[number % 4], max_new_tokens=120, ignore_eos=True,
                seed=100 + number, **sampling, **choices,
            )  # fmt: skip

        # More than both workers have rows for: they stay busy until the kill.
        undisturbed = await asyncio.gather(*(stream(number).result() for number in range(14)))
        streams = [stream(number) for number in range(14)]
        await asyncio.gather(*(anext(one) for one in streams[:3]))
        cluster.local.kill("worker-1", signal.SIGKILL)
        disturbed = await asyncio.gather(*(one.result() for one in streams))
        for before, after in zip(undisturbed, disturbed, strict=True):
            assert len(before.token_ids) == 120
            assert after.token_ids == before.token_ids
            told = after.choices[0].logprobs
            assert len(told) == 120
            assert [one.alternatives[0][0] for one in told] == [
                one.alternatives[0][0] for one in before.choices[0].logprobs
            ]
            # Another batch rounds otherwise: in float32 a logprob of these may be off by 1e-4, either way.
            values = [one.logprob for one in before.choices[0].logprobs]
            assert [one.logprob for one in told] == pytest.approx(values, abs=1e-3)
        assert len({one.token_ids for one in undisturbed}) == len(undisturbed)
        assert sum(one.continuations for one in disturbed) > 0, "the killed worker held nothing"
        await eventually(cluster.idle)
