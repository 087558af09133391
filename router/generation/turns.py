"""The parts of one call, some of which run at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def run_some_at_once(parts: Sequence[Callable[[], Awaitable[T]]], limit: int) -> list[T]:
    """Run all parts, at most `limit` at once; return their results in order.

    The first error ends all others, and is raised when they have ended; so does a cancellation.
    """
    turns = asyncio.Semaphore(limit)

    async def run(part: Callable[[], Awaitable[T]]) -> T:
        async with turns:
            return await part()

    tasks = [asyncio.create_task(run(part)) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
