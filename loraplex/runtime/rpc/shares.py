"""Limits that tenants share: a tenant takes more only while it then has no more than what was free before.

So n tenants that take all they can get have 1 / (n + 1) of the limit each, and as much stays free: a tenant that has
nothing finds room, whatever the others do. (A dynamic threshold: Choudhury and Hahne, Dynamic Queue Length Thresholds,
IEEE/ACM Transactions on Networking, 1998.)
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from loraplex.runtime.rpc.errors import Exhausted
from loraplex.runtime.rpc.tasks import retrieve_error

T = TypeVar("T")

# Mean time in seconds after which a refused client is to call again.
RETRY_S = 1.0


def spread(mean_s: float = RETRY_S) -> float:
    """Return a time around a mean: each client gets its own, so that they do not all come back at once."""
    return random.uniform(0.5, 1.5) * mean_s


class Shares:
    """The shares of one limit; an amount is of any unit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken = 0
        self._of_tenant: dict[str, int] = {}

    def take(self, tenant: str, amount: int = 1) -> bool:
        """Take an amount for a tenant until `give`; False where the tenant's share does not allow it now."""
        taken = self._of_tenant.get(tenant, 0)
        if taken + amount > self.limit - self._taken:
            return False
        self._taken += amount
        self._of_tenant[tenant] = taken + amount
        return True

    def take_or_refuse(
        self, tenant: str, amount: int = 1, *, subject: str, what: str, reason: str, retry_after_s: float = RETRY_S
    ) -> None:
        """Take an amount for a tenant until `give`. Raises Exhausted; `what` says what the limit is of."""
        if not self.take(tenant, amount):
            message = f"{tenant} has its share of the {self.limit} {what}"
            raise Exhausted(subject, message, retry_after_s=spread(retry_after_s), reason=reason)

    @contextmanager
    def held(
        self, tenant: str, *, subject: str, what: str, reason: str, retry_after_s: float = RETRY_S
    ) -> Iterator[None]:
        """Take one for a tenant while the context is open. Raises Exhausted, as `take_or_refuse`."""
        self.take_or_refuse(tenant, subject=subject, what=what, reason=reason, retry_after_s=retry_after_s)
        try:
            yield
        finally:
            self.give(tenant)

    def give(self, tenant: str, amount: int = 1) -> None:
        """Give back what `take` took."""
        self._taken -= amount
        remaining = self._of_tenant.pop(tenant, 0) - amount  # nobody is kept who has taken amounts of 0 alone
        if remaining:
            self._of_tenant[tenant] = remaining


class FairTurns:
    """Shares that are waited for: tenants take turns, and the requests of one tenant come in their order."""

    def __init__(self, limit: int) -> None:
        self._shares = Shares(limit)
        # Amounts that are waited for, by tenant; the tenant whose turn is next comes first.
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    async def take(self, tenant: str, amount: int = 1) -> None:
        """Wait until the tenant's share allows the amount, at most the limit; then it is taken until `give`."""
        if tenant not in self._waiting and self._shares.take(tenant, amount):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (amount, turn)
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(tenant, amount)
            else:
                self._remove(tenant, place)
            raise

    def give(self, tenant: str, amount: int = 1) -> None:
        """Give back what `take` took; who waits may take it."""
        self._shares.give(tenant, amount)
        self._admit()

    @asynccontextmanager
    async def turn(self, tenant: str, amount: int = 1) -> AsyncIterator[None]:
        """Wait for a turn, which lasts while the context is open."""
        await self.take(tenant, amount)
        try:
            yield
        finally:
            self.give(tenant, amount)

    async def run(self, tenant: str, start: Callable[[], asyncio.Future[T]]) -> T:
        """Start work at the tenant's turn, which lasts to the work's end: a caller that leaves does not free it."""
        await self.take(tenant)
        working = start()

        def ended(done: asyncio.Future[T]) -> None:
            self.give(tenant)
            retrieve_error(done)

        working.add_done_callback(ended)
        return await asyncio.shield(working)

    def _remove(self, tenant: str, place: tuple[int, asyncio.Future[None]]) -> None:
        queue = self._waiting.get(tenant, deque())
        if place in queue:  # else it was the first, and passed over already
            queue.remove(place)
            self._admit()  # a smaller amount behind this one may fit

    def _admit(self) -> None:
        """Admit waiting tenants in turn until no waiting request fits."""
        refused = 0
        while refused < len(self._waiting):
            tenant, queue = next(iter(self._waiting.items()))
            del self._waiting[tenant]
            while queue and queue[0][1].cancelled():
                queue.popleft()
            if not queue:
                continue
            if self._shares.take(tenant, queue[0][0]):
                queue.popleft()[1].set_result(None)
                refused = 0
            else:
                refused += 1
            if queue:
                self._waiting[tenant] = queue


class FairThreads:
    """Threads for work that would hold an event loop; tenants take turns."""

    def __init__(self, threads: int, name: str) -> None:
        self._turns, self._threads = FairTurns(threads), ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Return what a work returns that is done in a thread, at the tenant's turn. Raises what it raises."""
        run = asyncio.get_running_loop().run_in_executor
        return await self._turns.run(tenant, lambda: run(self._threads, work))

    def close(self) -> None:
        """Take no more work; a thread that works ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
