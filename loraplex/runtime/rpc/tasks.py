"""Work that runs again and again, until something else ends, or once for all who ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")


async def every(
    interval_s: float, look: Callable[[], Awaitable[Any] | None], *, passing: tuple[type[BaseException], ...] = ()
) -> NoReturn:
    """Call `look` every `interval_s`; ignore errors of `passing` types. Raises others."""
    while True:
        with suppress(*passing):
            if (looking := look()) is not None:
                await looking
        await asyncio.sleep(interval_s)


async def unless_ended(other: Awaitable[Any], work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None where the other has ended before; cancels the one that has not ended."""
    working, ending = asyncio.create_task(work), asyncio.ensure_future(other)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, ending):
            task.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; cancel it and return None when `stop` is set before."""
    return await unless_ended(stop.wait(), work)


def retrieve_error(ended: asyncio.Future[Any]) -> None:
    """Retrieve the error of work whose waiters may have left, so that asyncio does not log it."""
    if not ended.cancelled():
        ended.exception()


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
        retrieve_error(task)
