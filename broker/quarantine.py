"""The quarantine of tenants whose jobs kill engines: their jobs are refused for a while, and longer each time.

Only proof counts: a job that was ended because engines died of it, the last ones while they had no other job. So no
tenant is quarantined because its jobs were in a batch with another's.

    deaths with an adapter within an hour       1      2      3      4 and more
    refused: the tenant's jobs with it          1 min  5 min  25 min 1 h
    deaths with other adapters before it        -      1      2      3 and more
    refused: all jobs of the tenant             -      1 min  5 min  25 min to 1 h
"""

from __future__ import annotations

from redis.asyncio import Redis

from broker.keys import Keys
from broker.scripts import SCRIPTS, Scripts


class QuarantinedError(Exception):
    """The tenant's jobs, or those with this adapter, are refused for `left_ms` more."""

    def __init__(self, left_ms: int) -> None:
        super().__init__(
            f"jobs of this tenant and adapter kept killing engines; refused for {left_ms / 1e3:.0f} s more"
        )
        self.left_ms = left_ms


class Quarantine:
    """The quarantine of a cell; enqueue.lua and claim.lua apply it."""

    def __init__(self, redis: Redis, keys: Keys, scripts: Scripts = SCRIPTS) -> None:
        self._keys = keys
        self._record_death = scripts.register(redis, "record_death")

    async def record_death(self, tenant: str, adapter: str, job_id: str) -> int:
        """Record a job that engines died of; returns for how many ms its tenant and adapter are refused. Idempotent."""
        arguments = [self._keys.prefix, tenant, adapter, job_id]
        return int(await self._record_death(self._keys.waiting, arguments))
