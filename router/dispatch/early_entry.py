"""A job's entry in the queue, made while its router waits for the reservation of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from broker.ledger import ReserveCall
from broker.messages import Job
from broker.queue import JobQueue
from broker.queue_entry import Entry, is_short
from broker.terms import Placement


class EarlyEntry:
    """Makes an entry two passes of the event loop from now, when the call that was begun meanwhile is on its way.

    `enqueue` makes it where nothing waits so long, or the job is long. Nothing is made after the end of the context.
    """

    def __init__(self, queue: JobQueue, job: Job, place: Callable[[Job], Placement]) -> None:
        self._queue, self._job, self._place = queue, job, place
        self._made: tuple[Placement, Entry | None] | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._wait)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._next.cancel()

    def _wait(self) -> None:
        self._next = self._loop.call_soon(self.take)

    def take(self) -> tuple[Placement, Entry | None]:
        """Return the placement and the entry; None for a long job, whose entry the queue makes in a thread."""
        if self._made is None:
            placement = self._place(self._job)
            self._made = placement, self._queue.make_entry(self._job, placement) if is_short(self._job) else None
        return self._made

    async def enqueue(self, reserve: ReserveCall | None = None) -> None:
        """Put the entry into the queue, in one round trip with a reservation. Raises what JobQueue.enqueue does."""
        placement, entry = self.take()
        await self._queue.enqueue(self._job, placement, entry, reserve)
