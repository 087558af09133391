"""A worker whose engine stands still: its streams go on elsewhere, and it takes no other work until it steps again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from worker.engine.hash_engine import expected_ids
from worker.engine_api import EngineConfig, Stopping
from worker.io.engine_client import EngineProcess
from worker.ipc import Configure

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
MODEL = "hash:?vocab=32000&seed=1&step_ms=25"


def expected(prompt: str, digest: str, count: int) -> list[int]:
    stopping = Stopping(max_tokens=count)
    return list(expected_ids(MODEL, list(prompt.encode()), adapter_digest=digest, stopping=stopping))


async def test_a_worker_whose_engine_stands_still_claims_nothing(
    start_cluster: StartCluster, hash_adapters: Mapping[str, Path], eventually: Eventually
) -> None:
    # More work than one worker has rows: both have some.
    flags = ("--rows", "6", "--replace-s", "60")
    async with start_cluster(MODEL, hash_adapters, workers=2, worker_flags=flags) as cluster:

        async def ask(number: int, tokens: int) -> int:
            name, prompt = "abc"[number % 3], f"prompt {number}"
            answer = await cluster.client.generate(prompt, adapter_id=name, max_new_tokens=tokens)
            assert list(answer.token_ids) == expected(prompt, cluster.digests[name], tokens)
            return int(answer.continuations)

        async def listed(count: int) -> bool:
            return len(await cluster.workers()) == count

        async def all_run() -> bool:
            return all(worker.rows_running for worker in await cluster.workers())

        async def keep_asking() -> None:
            """Work that comes all the time must not make an engine look alive."""
            async with asyncio.TaskGroup() as asks:
                for number in range(1000, 2000):
                    asks.create_task(ask(number, 2))
                    await asyncio.sleep(0.1)

        running = [asyncio.create_task(ask(number, 120)) for number in range(8)]
        await eventually(all_run)
        engines = {worker.worker_id: worker.engine_pid for worker in await cluster.workers()}
        hung = engines.pop(next(iter(engines)))
        os.kill(hung, signal.SIGSTOP)
        try:
            arriving = asyncio.create_task(keep_asking())
            await eventually(lambda: listed(1))
            arriving.cancel()
            async with asyncio.timeout(60):
                later = await asyncio.gather(*(ask(number, 8) for number in range(100, 124)))
                moved = await asyncio.gather(*running)
        finally:
            os.kill(hung, signal.SIGCONT)
        assert set(moved) == {0, 1}, "some moved, and each of them once"
        assert later == [0] * len(later), "none of those that came later did"
        await asyncio.wait({arriving})
        assert arriving.cancelled(), "it asked for as long as was needed"
        await eventually(lambda: listed(2))
        await eventually(cluster.idle)


async def test_more_work_does_not_make_a_silent_engine_live() -> None:
    config = EngineConfig(MODEL, rows=2, adapter_slots=1, max_rank=8, step_tokens=64, threads=1)
    engine = await EngineProcess.start(Configure(config))
    try:
        await engine.ready()
        os.kill(engine.pid, signal.SIGSTOP)
        engine.expect()
        silent_s = engine.silent_s()
        for _ in range(3):
            await asyncio.sleep(0.01)
            engine.expect()
            assert engine.silent_s() > silent_s
            silent_s = engine.silent_s()
    finally:
        engine.kill()
        await engine.stop()
