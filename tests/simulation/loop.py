"""An event loop whose time is virtual, and whose tasks belong to nodes that can be frozen, woken and killed.

Nothing waits: when nothing is ready, time jumps to the next timer. A node is a process of the simulated cluster; a
frozen one is what SIGSTOP makes of it: its callbacks pile up and run when it wakes, its timers long overdue.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import selectors
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any, TypeVar, TypeVarTuple
from unittest import mock

T = TypeVar("T")
_Ts = TypeVarTuple("_Ts")

_ROOMS = ("loraplex.router.", "loraplex.worker.", "loraplex.hash_engine")
# The node that the running code belongs to; None: the world around it.
NODE: ContextVar[Node | None] = ContextVar("NODE", default=None)


# Minimum time in seconds to a timer: above the resolution of the system's clock, within which the loop calls early.
_STEP_S = 2 * time.get_clock_info("monotonic").resolution


class NothingHappensError(Exception):
    """No callback and no timer is left, though somebody waits."""


class Node:
    """A process: what runs in it, and whether it runs."""

    def __init__(self, name: str, owner: object = None) -> None:
        self.name = name
        self.owner = owner
        self.frozen = False
        # Time at which it was killed.
        self.died_at: float | None = None
        _running_loop().nodes.append(self)
        self._parked: list[asyncio.Handle] = []

    @property
    def dead(self) -> bool:
        """Return whether it was killed."""
        return self.died_at is not None

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something in this process."""
        context = copy_context()
        context.run(NODE.set, self)
        return asyncio.get_running_loop().create_task(work, context=context)

    def call(self, function: Callable[[], object]) -> None:
        """Call something in this process, once it runs."""
        context = copy_context()
        context.run(NODE.set, self)
        asyncio.get_running_loop().call_soon(function, context=context)

    def park(self, handle: asyncio.Handle) -> None:
        """Keep what would run now."""
        self._parked.append(handle)

    def kill(self) -> None:
        """End the node: it never runs again."""
        self.frozen, self.died_at = True, _running_loop().time()

    def wake(self) -> None:
        """Go on; what piled up runs first."""
        if self.dead:
            return
        self.release()

    def release(self) -> None:
        """Let run what piled up."""
        self.frozen = False
        parked, self._parked = self._parked, []
        _running_loop().ready.extend(parked)


class _Ready(deque[asyncio.Handle]):
    """The loop's queue of callbacks, but for those of frozen nodes."""

    def append(self, handle: asyncio.Handle) -> None:
        node = handle._context.get(NODE)  # type: ignore[attr-defined]  # what call_soon was given
        if node is not None and node.frozen:
            node.park(handle)
        else:
            super().append(handle)


class _Jump(selectors.SelectSelector):
    """A selector that lets time jump where the loop would wait for sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingHappensError
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time begins at 0 and is what `time` says."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        # The one part of the base class that is not its interface: every callback passes through it.
        self.ready = self._ready = _Ready()
        self.nodes: list[Node] = []

    def time(self) -> float:
        """Seconds since the beginning."""
        return self._jump.now

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call at a time that is reached: a timer within the clock's resolution is called before its time, and whoever
        waits for the rest of it would wait forever, since nothing takes time here.
        """
        if when > self.time():
            when = max(when, self.time() + _STEP_S)
        return super().call_at(when, callback, *args, context=context)

    def exhume(self) -> None:
        """Let all nodes run."""
        for node in self.nodes:
            node.release()

    def run_in_executor(self, executor: Any, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """At once: threads have no place in virtual time."""
        done: asyncio.Future[T] = self.create_future()
        done.set_result(function(*args))
        return done


def _running_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


@contextlib.contextmanager
def virtual_time(chance: Random) -> Iterator[VirtualLoop]:
    """A loop; meanwhile the process's clock is the loop's, and names that are drawn at random follow from `chance`."""
    loop = VirtualLoop()
    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(secrets, "token_hex", lambda size=32: chance.randbytes(size).hex()),
    ):
        try:
            yield loop
        finally:
            _end_all(loop)
            loop.close()


@contextlib.contextmanager
def replaced(originals: Iterable[tuple[object, object]]) -> Iterator[None]:
    """Other objects in the place of some, under whatever name the rooms' modules have imported them."""
    with contextlib.ExitStack() as stack:
        for original, other in originals:
            found = [
                (module, name)
                for path, module in tuple(sys.modules.items())
                if path.startswith(_ROOMS)
                for name, value in tuple(vars(module).items())
                if value is original and getattr(original, "__module__", "") != path
            ]
            assert found, f"nobody imports {original}"
            for module, name in found:
                stack.enter_context(mock.patch.object(module, name, other))
        yield


def _end_all(loop: VirtualLoop) -> None:
    """Wake even the dead, so that every task ends as tasks do: nobody looks any more."""
    loop.call_soon(loop.exhume)
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
