"""The ledger over a simulated server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from broker.ledger_records import AccountCopy, Charge, Look, Reservation, TokenLimits
from tests.simulation.loop import NODE, Node
from tests.simulation.redis import SimulatedRedis


@dataclass
class SimulatedReserve:
    """Stands in for broker.ledger_records.ReserveCall: the simulated queue carries it out before an enqueue."""

    reserve: Callable[[], tuple[Reservation, AccountCopy]]
    answer: tuple[Reservation, AccountCopy] | Exception | None = None


@dataclass(frozen=True)
class Held:
    """A reservation of a call, and the router that has it."""

    id: str
    router: Node


# The reservations of the story whose call runs, by account.
HELD: ContextVar[dict[str, Held] | None] = ContextVar("HELD", default=None)


class SimulatedLedger:
    """Stands in for broker.ledger.Ledger."""

    def __init__(self, redis: SimulatedRedis) -> None:
        self._redis = redis

    async def reserve(
        self,
        tenant: str,
        wanted: Reservation,
        received: int | None,
        limits: TokenLimits,
        seen: AccountCopy,
        send: Callable[[SimulatedReserve], Awaitable[None]] | None = None,
    ) -> tuple[Reservation, AccountCopy]:
        """See Ledger."""
        redis, held, router = self._redis, HELD.get(), NODE.get()
        counted_at = asyncio.get_running_loop().time()

        def reserve() -> tuple[Reservation, AccountCopy]:
            granted, account = redis.data.ledger.reserve(tenant, wanted, received, limits, seen, redis.now_ms)
            redis.granted.append((tenant, redis.now_ms, granted.input + granted.output))
            if held is not None and router is not None:
                held[tenant] = Held(granted.id, router)
            if received is not None:
                self._told(router, tenant, [granted], counted_at)
            return granted, account

        if send is None:
            return await redis.call(reserve)
        await send(call := SimulatedReserve(reserve))
        if isinstance(call.answer, Exception):
            raise call.answer
        assert call.answer is not None
        return call.answer

    async def settle(
        self, tenant: str, reservation: Reservation, state: str, seen: AccountCopy
    ) -> tuple[AccountCopy, Charge | None]:
        """See Ledger."""
        redis, router, counted_at = self._redis, NODE.get(), asyncio.get_running_loop().time()

        def settle() -> tuple[AccountCopy, Charge | None]:
            settled = redis.data.ledger.settle(tenant, reservation, state, seen, redis.now_ms)
            self._told(router, tenant, [reservation], counted_at)
            return settled

        return await redis.call(settle)

    async def look(self, tenant: str, seen: AccountCopy, reservations: Sequence[Reservation] = ()) -> Look:
        """See Ledger."""
        redis, router, counted_at = self._redis, NODE.get(), asyncio.get_running_loop().time()

        def look() -> Look:
            found = redis.data.ledger.look(tenant, seen, reservations, redis.now_ms)
            self._told(router, tenant, reservations, counted_at)
            return found

        return await redis.call(look)

    def _told(self, router: Node | None, tenant: str, reservations: Sequence[Reservation], counted_at: float) -> None:
        told_s = self._redis.told_s
        for one in reservations:
            told_s[router, tenant, one.id] = max(told_s.get((router, tenant, one.id), 0.0), counted_at)
