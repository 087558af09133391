"""The calls that run on an API key: they end with a status of their own when the key is revoked."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from rpc.errors import CallError

# Why a call's task has been cancelled; rpc.status turns it into the call's status.
_ENDINGS: WeakKeyDictionary[asyncio.Task[Any], CallError] = WeakKeyDictionary()


class RunningCalls:
    """The tasks of a process's calls, by their key."""

    def __init__(self) -> None:
        self._tasks: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)

    def enter(self, key_id: str) -> None:
        """Add the call that the current task serves, until the task ends."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[key_id].add(task)
        task.add_done_callback(lambda done: self._leave(key_id, done))

    def end(self, key_id: str, error: Callable[[], CallError]) -> None:
        """End the key's calls with an error, each with its own. May be called from another thread."""
        for task in tuple(self._tasks.get(key_id, ())):
            task.get_loop().call_soon_threadsafe(_cancel, task, error())

    def _leave(self, key_id: str, task: asyncio.Task[Any]) -> None:
        tasks = self._tasks[key_id]
        tasks.discard(task)
        if not tasks:
            del self._tasks[key_id]


def _cancel(task: asyncio.Task[Any], error: CallError) -> None:
    if not task.done() and task not in _ENDINGS:
        _ENDINGS[task] = error
        task.cancel()


def take_ending() -> CallError | None:
    """Return why the current task was cancelled and let it go on; None where its client left or the server stops."""
    task = asyncio.current_task()
    error = None if task is None else _ENDINGS.pop(task, None)
    if task is not None and error is not None:
        task.uncancel()
    return error
