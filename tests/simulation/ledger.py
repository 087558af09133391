"""The ledger over a simulated server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from broker.ledger_records import AccountCopy, Charge, Look, Reservation, TokenLimits
from tests.simulation.redis import SimulatedRedis


@dataclass
class SimulatedReserve:
    """Stands in for broker.ledger_records.ReserveCall: the simulated queue carries it out before an enqueue."""

    reserve: Callable[[], tuple[Reservation, AccountCopy]]
    answer: tuple[Reservation, AccountCopy] | Exception | None = None


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
        redis = self._redis

        def reserve() -> tuple[Reservation, AccountCopy]:
            granted, account = redis.data.ledger.reserve(tenant, wanted, received, limits, seen, redis.now_ms)
            redis.granted.append((tenant, redis.now_ms, granted.input + granted.output))
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
        redis = self._redis
        return await redis.call(lambda: redis.data.ledger.settle(tenant, reservation, state, seen, redis.now_ms))

    async def look(self, tenant: str, seen: AccountCopy, reservations: Sequence[Reservation] = ()) -> Look:
        """See Ledger."""
        redis = self._redis
        return await redis.call(lambda: redis.data.ledger.look(tenant, seen, reservations, redis.now_ms))
