"""The whole path with the hash model: every token that is lost, repeated or of another adapter would show."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex_client import (
    AlreadyExistsError,
    UnavailableError,
)

from worker.engine.hash_tokens import expected_ids
from worker.engine_api import Sampling, Stopping

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
FAST = "hash:?vocab=32000&seed=1"
SLOW = "hash:?vocab=32000&seed=1&step_ms=5"


def expected(model: str, prompt: str, digest: str, max_tokens: int, sampling: Sampling | None = None) -> list[int]:
    ids = expected_ids(
        model, list(prompt.encode()), adapter_digest=digest, sampling=sampling, stopping=Stopping(max_tokens=max_tokens)
    )
    return list(ids)


@pytest.mark.parametrize("victim", ["worker", "engine"])
async def test_killing_a_worker_in_mid_stream_changes_no_token(
    start_cluster: StartCluster, hash_adapters: Mapping[str, Path], victim: str, eventually: Eventually
) -> None:
    # Fewer rows than jobs: both workers hold some.
    async with start_cluster(SLOW, hash_adapters, workers=2, worker_flags=("--rows", "16")) as cluster:
        started = asyncio.Event()
        count = 0
        state: Any = None

        async def ask(number: int) -> int:
            nonlocal count
            name = "abc"[number % 3]
            prompt, total = f"prompt {number}", 0
            got: list[int] = []
            async for piece in cluster.client.generate_stream(prompt, adapter_id=name, max_new_tokens=400):
                assert piece.offset == len(got)
                got += piece.token_ids
                count += 1
                if count == 400:
                    started.set()
                if piece.finished:
                    total = piece.finished.continuations
            assert got == expected(SLOW, prompt, cluster.digests[name], 400)
            return total

        async def runs() -> bool:
            nonlocal state
            (state,) = [w for w in await cluster.workers() if w.pid == cluster.local.processes["worker-1"].pid]
            return bool(state.rows_running)

        asks = asyncio.gather(*(ask(number) for number in range(24)))
        await started.wait()
        await eventually(runs)
        if victim == "worker":
            cluster.local.kill("worker-1", signal.SIGKILL)
        else:
            os.kill(state.engine_pid, signal.SIGKILL)
        continuations = await asks
        assert sum(continuations) > 0, "the killed worker held nothing"
        await eventually(cluster.idle)


async def test_health_tells_whether_work_can_be_served(start_cluster: StartCluster) -> None:
    async with start_cluster(FAST, {}) as cluster, grpc.aio.insecure_channel(cluster.local.router) as channel:
        changes = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(changes)).status == health_pb2.HealthCheckResponse.SERVING
        cluster.local.kill("worker-1", signal.SIGKILL)
        assert (await anext(changes)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(UnavailableError, match="no worker"):
            await cluster.client.generate("x")
        await cluster.local.start_worker()
        assert (await anext(changes)).status == health_pb2.HealthCheckResponse.SERVING
        answer = await cluster.client.generate("x", max_new_tokens=5)
        assert list(answer.token_ids) == expected(FAST, "x", "", 5)


async def test_a_worker_that_is_told_to_stop_hands_its_work_over(start_cluster: StartCluster) -> None:
    flags = ("--rows", "8", "--drain-s", "0.2")
    async with start_cluster(SLOW, {}, workers=2, worker_flags=flags) as cluster:
        streams = [cluster.client.generate_stream(f"prompt {number}", max_new_tokens=300) for number in range(12)]
        firsts = [await anext(stream) for stream in streams]
        cluster.local.kill("worker-1", signal.SIGTERM)
        wholes = [await stream.result() for stream in streams]
        for number, (first, whole) in enumerate(zip(firsts, wholes, strict=True)):
            assert first.offset == 0
            assert list(whole.token_ids) == expected(SLOW, f"prompt {number}", "", 300)
        assert await cluster.local.processes["worker-1"].exited == 0
        assert sum(whole.continuations for whole in wholes) > 0


async def test_the_launcher_replaces_a_worker_that_died(start_cluster: StartCluster) -> None:
    async with start_cluster(SLOW, {}) as cluster:
        stream = cluster.client.generate_stream("x", max_new_tokens=200)
        await anext(stream)
        os.kill(cluster.local.processes["worker-1"].pid, signal.SIGKILL)
        whole = await stream.result()
        assert list(whole.token_ids) == expected(SLOW, "x", "", 200)
        assert whole.continuations > 0


async def test_several_choices_survive_a_killed_worker(start_cluster: StartCluster, eventually: Eventually) -> None:
    async with start_cluster(SLOW, {}, workers=2, worker_flags=("--rows", "6")) as cluster:
        streams = [cluster.client.generate_stream(f"prompt {number}", n=4, max_new_tokens=100) for number in range(2)]
        for stream in streams:
            await anext(stream)
        cluster.local.kill("worker-1", signal.SIGKILL)
        wholes = [await stream.result() for stream in streams]
        for number, whole in enumerate(wholes):
            prompt = list(f"prompt {number}".encode())
            truth = [expected_ids(SLOW, prompt, stopping=Stopping(max_tokens=100), choice=c) for c in range(4)]
            assert [choice.token_ids for choice in whole.choices] == truth
            assert whole.usage.completion_tokens == 400
        assert sum(whole.continuations for whole in wholes) > 0
        await eventually(cluster.idle)


async def test_an_id_that_is_used_again_at_once_gets_its_own_tokens(
    start_cluster: StartCluster, eventually: Eventually
) -> None:
    async with start_cluster(SLOW, {}, workers=2, worker_flags=("--rows", "4")) as cluster:

        async def ask_and_leave_and_ask(number: int) -> None:
            for turn in range(5):
                prompt = f"prompt {number} {turn}"
                options = {"request_id": f"same {number}", "max_new_tokens": 30}
                while True:
                    try:
                        async with cluster.client.generate_stream(prompt, **options) as stream:
                            first = await anext(stream)
                            if turn % 2 == 0:
                                break  # leaves in mid-stream, and the next turn comes at once
                            whole = await stream.result()
                            assert list(whole.token_ids) == expected(SLOW, prompt, "", 30)
                            break
                    except AlreadyExistsError:  # the router has not yet seen that the last one left
                        await asyncio.sleep(0.01)
                assert first.token_ids[0] == expected(SLOW, prompt, "", 1)[0]

        async with asyncio.timeout(60):
            await asyncio.gather(*(ask_and_leave_and_ask(number) for number in range(8)))
        await eventually(cluster.idle)
