"""The ledger over a simulated server."""

from __future__ import annotations

from collections.abc import Sequence

from broker.ledger_records import AccountCopy, Charge, Look, Reservation, TokenLimits
from tests.simulation.redis import SimulatedRedis


class SimulatedLedger:
    """Stands in for broker.ledger.Ledger."""

    def __init__(self, redis: SimulatedRedis) -> None:
        self._redis = redis

    async def reserve(
        self, tenant: str, wanted: Reservation, received: int | None, limits: TokenLimits, seen: AccountCopy
    ) -> tuple[Reservation, AccountCopy]:
        """See Ledger."""
        redis = self._redis

        def reserve() -> tuple[Reservation, AccountCopy]:
            granted, account = redis.data.ledger.reserve(tenant, wanted, received, limits, seen, redis.now_ms)
            redis.granted.append((tenant, redis.now_ms, granted.input + granted.output))
            return granted, account

        return await redis.call(reserve)

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
