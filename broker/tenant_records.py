"""The records that a cell of Redis has of a tenant, and their removal.

The accounts of the ledger stay, since a tenant that comes back must not have its quota again; so do charges whose usage
events are not written yet, and what expires within two minutes: charges of claimed jobs, operators' commands.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from broker.codec import decode_dead_job
from broker.commands import PinnedAdapters
from broker.keys import Keys
from broker.scripts import SCRIPTS, Scripts

# Maximum number of jobs, and of dead letters, that one script looks at: it stops the whole server while it runs.
LOOKS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class RemovedRecords:
    """The numbers of records that a removal found: waiting jobs, pins, and the others under the tenant's name."""

    jobs: int = 0
    pins: int = 0
    others: int = 0


class TenantRecords:
    """The records of tenants in one cell."""

    def __init__(self, redis: Redis, keys: Keys, pins: PinnedAdapters, scripts: Scripts = SCRIPTS) -> None:
        self._redis = redis
        self._keys = keys
        self._pins = pins
        self._forget = scripts.register(redis, "forget_tenant")

    async def forget(self, tenant: str) -> RemovedRecords:
        """Remove what the cell has of a tenant; returns what there was."""
        pins = await self._pins.forget_tenant(tenant)
        dead = await self._dead_letters(tenant)
        jobs = others = at = 0
        while at >= 0 or dead:
            letters, dead = dead[:LOOKS_AT_ONCE], dead[LOOKS_AT_ONCE:]
            arguments = [self._keys.prefix, tenant, max(at, 0), LOOKS_AT_ONCE, *letters]
            gone, records, at = await self._forget(self._keys.waiting, arguments)
            jobs, others = jobs + gone, others + records
        return RemovedRecords(jobs, pins, others)

    async def _dead_letters(self, tenant: str) -> list[bytes]:
        """Return a tenant's dead letters as they are."""
        found: list[bytes] = []
        for data in await self._redis.lrange(self._keys.dead, 0, -1):
            assert isinstance(data, bytes), "connect() makes clients of bytes"
            with suppress(DecodeError):  # another version wrote it
                if decode_dead_job(data).tenant == tenant:
                    found.append(data)
        return found
