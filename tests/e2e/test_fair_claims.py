"""The whole path with one row: who goes next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from loraplex_client import AsyncClient

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
SLOW = "hash:?vocab=32000&seed=1&step_ms=5"


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
