"""The whole path with few rows: who goes next, and who shares rows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from loraplex_client import AsyncClient

from worker.engine.hash_engine import expected_ids
from worker.engine_api import Stopping

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
SLOW = "hash:?vocab=32000&seed=1&step_ms=25"


async def waiting(cluster: Any) -> int:
    """Count the jobs that wait in the queue."""
    return sum([await cluster.redis.zcard(key) async for key in cluster.redis.scan_iter("*:waiting")])


async def test_priority_orders_a_tenant_s_own_and_nobody_else_s(
    start_cluster: StartCluster, eventually: Eventually
) -> None:
    async with (
        start_cluster(SLOW, {}, worker_flags=("--rows", "1")) as cluster,
        AsyncClient(cluster.local.router, "globex") as other,
    ):
        done: list[str] = []

        async def ask(client: AsyncClient, name: str, priority: int) -> None:
            await client.generate(name, max_new_tokens=10, priority=priority)
            done.append(name)

        async def rows_running() -> bool:
            return any(worker.rows_running for worker in await cluster.workers())

        async def all_wait() -> bool:
            return await waiting(cluster) == 4

        first = asyncio.create_task(cluster.client.generate("first", max_new_tokens=4_000))
        await eventually(rows_running)
        asked = (
            ask(cluster.client, "low", -1),
            ask(cluster.client, "plain", 0),
            ask(cluster.client, "high", 100),
            ask(other, "theirs", -100),
        )
        answers = asyncio.gather(*asked)
        await eventually(all_wait)
        first.cancel()
        await answers
        # The other tenant was served nothing so far: it is next, whatever the priorities of this one.
        assert done == ["theirs", "high", "plain", "low"]


async def test_a_quiet_tenant_gets_rows_beside_endless_answers_that_hold_all_and_these_go_on(
    start_cluster: StartCluster, eventually: Eventually
) -> None:
    async with (
        start_cluster(SLOW, {}, workers=2, worker_flags=("--rows", "3")) as cluster,
        AsyncClient(cluster.local.router, "globex") as quiet,
    ):
        made: dict[str, list[int]] = {f"endless {number}": [] for number in range(8)}

        async def read(prompt: str) -> None:
            async for piece in cluster.client.generate_stream(prompt, max_new_tokens=4_000):
                made[prompt] += piece.token_ids

        endless = [asyncio.create_task(read(prompt)) for prompt in made]

        async def full() -> bool:
            return sum(map(bool, made.values())) == 6

        await eventually(full)
        for number in range(2):
            whole = await quiet.generate(f"quiet {number}", max_new_tokens=20)
            assert whole.token_ids == expected_ids(SLOW, list(f"quiet {number}".encode()), stopping=Stopping(20))
        begun = {prompt: len(ids) for prompt, ids in made.items() if ids}
        assert len(begun) == 6

        async def go_on() -> bool:
            return all(len(made[prompt]) > count for prompt, count in begun.items())

        await eventually(go_on)
        for task in endless:
            task.cancel()
        for prompt, ids in made.items():
            if ids:
                assert tuple(ids) == expected_ids(SLOW, list(prompt.encode()), stopping=Stopping(len(ids)))
