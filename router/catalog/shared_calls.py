"""Calls to the store that several requests need at the same time, made once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedCalls(Generic[T]):
    """The calls under way, by key. A caller that leaves does not cancel its call for the others."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[T]] = {}

    async def run(self, key: Hashable, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what the call under way with a key returns; without one, begin it."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(call())
            task.add_done_callback(lambda ended: self._ended(key, ended))
        return await asyncio.shield(task)

    def _ended(self, key: Hashable, task: asyncio.Task[T]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # callers that have left do not look at it
