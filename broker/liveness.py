"""Live workers and routers. A worker has a key that expires without beats, a router a score; both by Redis's clock."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import DecodeError
from redis.asyncio import Redis

from broker.functions import LIBRARY, Library
from broker.keys import Keys
from broker.messages import WorkerState, decode_record, encode_record

log = logging.getLogger(__name__)

# Interval in ms of a worker's beats.
BEAT_MS = 500


@dataclass(frozen=True, slots=True)
class CellLoad:
    """The load of a cell: its waiting jobs, their work and tenants, and the work that it claims in a second.

    `rate` is 0 where no measurement tells. `arrivals` counts all jobs that have come, from 1 on and from there anew.
    """

    waiting: int = 0
    work: float = 0.0
    rate: float = 0.0
    tenants: int = 0
    arrivals: int = 0


NO_LOAD = CellLoad()


@dataclass(frozen=True, slots=True)
class Census:
    """The live workers, ordered by id. `server` changes with a restart, a failover and the loss of all data."""

    server: str
    workers: list[WorkerState]
    # Names of keys that had another type than broker/keys.py says and that were set aside, without a tenant's.
    set_aside: tuple[str, ...] = ()
    # Number of homes of the adapters with several, by the last ADAPTER_DIGITS of their digests (broker/homes.py).
    homes: Mapping[str, int] = field(default_factory=dict)
    load: CellLoad = NO_LOAD


class Liveness:
    """The workers and routers of one cell."""

    def __init__(self, redis: Redis, keys: Keys, *, library: Library = LIBRARY) -> None:
        self._keys = keys
        self._beat = library.function(redis, "beat")
        self._declare_dead = library.function(redis, "declare_dead")
        self._live_routers = library.function(redis, "live_routers")
        self._census = library.function(redis, "census")

    async def beat(self, state: WorkerState) -> list[str]:
        """Record that a worker lives, for the next WORKER_TTL_MS; return the relay addresses of the live routers."""
        routers = await self._beat(
            self._keys.workers,
            [self._keys.prefix, state.incarnation, state.worker_id, encode_record(state)],
        )
        return [router.decode(errors="replace") for router in routers]

    async def declare_dead(self, incarnation: str) -> None:
        """Record at once that an incarnation lives no more; jobs are not held for its worker."""
        await self._declare_dead(self._keys.workers, [self._keys.prefix, incarnation])

    async def take_census(self, router: str = "", busy: float | None = None) -> Census:
        """Return who lives; a router that gives its own address is recorded as alive.

        `busy`: to how many workers' rows the used rows of all add up, which decides how many homes adapters have; None
        changes nothing.
        """
        arguments = [self._keys.prefix, router, secrets.token_hex(8), "" if busy is None else busy]
        server, states, aside, homes, load = await self._census(self._keys.workers, arguments)
        workers: list[WorkerState] = []
        for state in states:
            try:
                workers.append(decode_record(WorkerState, state))
            except DecodeError:  # another version wrote it: a worker that this one cannot use
                continue
        workers.sort(key=lambda worker: worker.worker_id)
        names = [name.decode(errors="replace") for name in homes[::2]]
        numbers = dict(zip(names, map(int, homes[1::2]), strict=True))
        waiting, work, rate, tenants, arrivals = load
        load_now = CellLoad(int(waiting), float(work), float(rate), int(tenants), int(arrivals))
        return Census(server.decode(errors="replace"), workers, self._report(aside), numbers, load_now)

    def _report(self, aside: Sequence[bytes]) -> tuple[str, ...]:
        """Log the keys that were set aside, given by name and type; return their names without a tenant's."""
        texts, prefix = [text.decode(errors="replace") for text in aside], self._keys.prefix
        for name, kind in zip(texts[::2], texts[1::2], strict=True):
            log.error("the Redis key %s%s was a %s; it is %saside:%s now, for a day", prefix, name, kind, prefix, name)
        return tuple(name.partition(":")[0] for name in texts[::2])

    async def live_routers(self) -> list[str]:
        """Return the relay addresses of the live routers."""
        routers = await self._live_routers(self._keys.workers, [self._keys.prefix])
        return sorted(router.decode(errors="replace") for router in routers)

    async def live_workers(self) -> list[WorkerState]:
        """Return the live workers, ordered by id."""
        return (await self.take_census()).workers
