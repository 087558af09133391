"""Messages that stay unread because of clients: their calls are cut after a bounded time.

HTTP/2 lets a client read nothing of a stream. gRPC would wait with the stream's next message or its status until the
client leaves. Messages that clients do not send are rpc.receiving's.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Collection, Iterator
from typing import Any

log = logging.getLogger(__name__)

# Timeout in seconds for a client to take a message. One of 4 MiB takes as long at 70 kB a second.
STALL_S = 60.0
# Number of looks in that time, few since one may go through all tasks: a call is cut up to a quarter of it later.
_LOOKS = 4
# Name of the task with which gRPC waits for the end of a call; that task starts the one that serves the call.
_WAITER = "rpc_task"

Call = asyncio.Task[Any]


class UnreadMessages:
    """The calls of one server that wait until their clients take a message. A call is the task that serves it."""

    def __init__(self, limit_s: float = STALL_S) -> None:
        self._limit_s = limit_s
        # Since when on the loop's clock each waits, in their order.
        self._since: dict[Call, float] = {}
        self._looking = False

    def begin(self) -> None:
        """Note the current call, which is forgotten at its end."""
        current_call().add_done_callback(self.goes_on)

    def waits(self, call: Call) -> None:
        """Note that a call waits for its client from now on, or still does."""
        loop = call.get_loop()
        self._since.setdefault(call, loop.time())
        if not self._looking:
            self._looking = True
            loop.call_later(self._limit_s / _LOOKS, self._look)

    def goes_on(self, call: Call) -> None:
        """Note that a call waits for its client no more."""
        self._since.pop(call, None)

    def _look(self) -> None:
        """Cut the calls that have waited too long; come back while there are others."""
        loop = asyncio.get_running_loop()
        late = set[Call]()
        for call, since in self._since.items():
            if loop.time() - since < self._limit_s:
                break
            late.add(call)
        if late:
            self._cut(late)
        self._looking = bool(self._since)
        if self._looking:
            loop.call_later(self._limit_s / _LOOKS, self._look)

    def _cut(self, calls: Collection[Call]) -> None:
        """End the tasks of calls, and gRPC's own: it resets the stream of a call to which no task refers any more."""
        log.info("cut %d calls, whose clients have left a message unread for %g s", len(calls), self._limit_s)
        waiters = list(_waiters(calls))
        if len(waiters) < len(calls):  # another version of gRPC may have other tasks
            log.warning("found gRPC's own tasks of %d of %d calls: others keep their streams", len(waiters), len(calls))
        for waiter in waiters:
            waiter.cancel()
        for call in calls:
            self.goes_on(call)
            call.cancel()


def current_call() -> Call:
    """Return the call that the current task serves."""
    call = asyncio.current_task()
    assert call is not None
    return call


def _waiters(calls: Collection[Call]) -> Iterator[asyncio.Task[Any]]:
    """Yield the tasks with which gRPC waits for the ends of these calls; the variables of their coroutines name these.

    gRPC has no other way to end a call on which a message waits.
    """
    for task in asyncio.all_tasks():
        if task.get_name() == _WAITER:
            variables = gc.get_referents(*gc.get_referents(task.get_coro()))
            if any(isinstance(served, asyncio.Task) and served in calls for served in variables):
                yield task
