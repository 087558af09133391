"""The calls that run on a credential: they end with a status of their own when it expires or its key is revoked."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from rpc.errors import CallError, Unauthenticated
from rpc.identity.principal import Principal

# Longest time in seconds between looks at the wall clock, which may be set.
LONGEST_S = 60.0

# Reasons for which tasks of calls were cancelled; rpc.status_interceptor makes them their status. None: the call has
# its answer.
_ENDINGS: WeakKeyDictionary[asyncio.Task[Any], CallError | None] = WeakKeyDictionary()


@dataclass(slots=True, eq=False)
class _Call:
    """A running call, the hash of the secret that it came with, and the timer of its end."""

    task: asyncio.Task[Any]
    secret: bytes
    timer: asyncio.TimerHandle | None = None


class RunningCalls:
    """The calls of a process's servers: they end with their credential, and with the revocation of their key."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._of_key: defaultdict[str, set[_Call]] = defaultdict(set)

    def enter(self, principal: Principal) -> None:
        """Add the call that the current task serves, until the task ends."""
        if not principal.key_id and principal.expires_at is None:
            return
        task = asyncio.current_task()
        assert task is not None
        call = _Call(task, principal.secret_sha256)
        if principal.key_id:
            self._of_key[principal.key_id].add(call)
        self._end_at(call, principal.expires_at)
        task.add_done_callback(lambda _: self._leave(principal.key_id, call))

    def end(self, key_id: str, error: Callable[[], CallError]) -> None:
        """End the key's calls with an error, each with its own. May be called from another thread."""
        for call in tuple(self._of_key.get(key_id, ())):
            call.task.get_loop().call_soon_threadsafe(end_call, call.task, error())

    def change(self, key_id: str, ends_at: Callable[[bytes], float | None]) -> None:
        """Set anew when the key's calls end, by the hashes of their secrets. May be called from another thread."""
        for call in tuple(self._of_key.get(key_id, ())):
            call.task.get_loop().call_soon_threadsafe(self._end_at, call, ends_at(call.secret))

    def _end_at(self, call: _Call, at: float | None) -> None:
        """End a call at this time of the wall clock, which is looked at again every LONGEST_S."""
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        if at is None or call.task.done():
            return
        left_s = at - self._now()
        if left_s <= 0:
            end_call(call.task, Unauthenticated("the credential has expired", reason="CREDENTIAL_EXPIRED"))
            return
        call.timer = call.task.get_loop().call_later(min(left_s, LONGEST_S), self._end_at, call, at)

    def _leave(self, key_id: str, call: _Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if key_id:
            calls = self._of_key[key_id]
            calls.discard(call)
            if not calls:
                del self._of_key[key_id]


def end_call(task: asyncio.Task[Any], error: CallError) -> None:
    """End the call that a task serves with an error, whatever it waits for, unless it has ended or is ending."""
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


async def let_finish() -> None:
    """Let the call of the current task end as it is: it has its answer, which gRPC may still have to send."""
    task = asyncio.current_task()
    if task is None:
        return
    if _ENDINGS.get(task) is not None:  # it was cancelled in this moment, which the next await would raise
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        task.uncancel()
    _ENDINGS[task] = None
