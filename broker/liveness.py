"""Live workers and routers, and which workers an adapter prefers.

A worker has a key that expires without beats, a router a score; both by Redis's clock. An adapter prefers workers by
rendezvous hashing with bounded load (Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998):
each worker's weight for an adapter is a hash of both, the highest comes first; one that comes or goes moves only its
own adapters. The bound on load: Mirrokni et al., Consistent hashing with bounded loads, 2018.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from operator import attrgetter

from msgspec import DecodeError
from redis.asyncio import Redis

from broker.functions import LIBRARY, Library
from broker.keys import Keys
from broker.messages import WorkerState, decode_record, encode_record

log = logging.getLogger(__name__)

# Interval in ms of a worker's beats.
BEAT_MS = 500


@dataclass(frozen=True, slots=True)
class Census:
    """The live workers, ordered by id. `server` changes with a restart, a failover and the loss of all data."""

    server: str
    workers: list[WorkerState]
    # Names of keys that had another type than broker/keys.py says and that were set aside, without a tenant's.
    set_aside: tuple[str, ...] = ()


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

    async def take_census(self, router: str = "") -> Census:
        """Return who lives; a router that gives its own address is recorded as alive."""
        arguments = [self._keys.prefix, router, secrets.token_hex(8)]
        server, states, aside = await self._census(self._keys.workers, arguments)
        workers: list[WorkerState] = []
        for state in states:
            try:
                workers.append(decode_record(WorkerState, state))
            except DecodeError:  # another version wrote it: a worker that this one cannot use
                continue
        workers.sort(key=lambda worker: worker.worker_id)
        return Census(server.decode(errors="replace"), workers, self._report(aside))

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


# Maximum number of preferred workers; each counts where those before it have no free rows.
PREFERRED = 3
# A worker is overloaded above this many times the mean load, if more than half of its rows are used: below that a row
# more costs little.
LOAD_BOUND = 1.25
_BITS = 2**64 - 1


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A live worker, its used rows and all its rows."""

    worker_id: str
    used: int
    rows: int


@lru_cache(maxsize=16)
def _hashes(worker_ids: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(map(_hash, worker_ids))


@lru_cache(maxsize=4096)
def _ranking(digest: str, worker_ids: tuple[str, ...]) -> tuple[int, ...]:
    """Return the indices of `worker_ids`, ordered by falling weight."""
    # The hashes of both are mixed: hashing each pair of a thousand workers would take a router two ms a job.
    own = _hash(digest)
    weights = [_mixed(own ^ other) for other in _hashes(worker_ids)]
    return tuple(sorted(range(len(weights)), key=weights.__getitem__, reverse=True))


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def _mixed(number: int) -> int:
    """Mix the bits of a number of 64 bits with Stafford's variant 13 of a finalizer.

    Steele et al., Fast splittable pseudorandom number generators, 2014.
    """
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _BITS
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _BITS
    return number ^ (number >> 31)


def preferred(digest: str, workers: Sequence[WorkerLoad]) -> tuple[str, ...]:
    """Return the ids of the workers that an adapter prefers, the best first, without overloaded ones."""
    ordered = sorted(workers, key=_id_of)
    mean = sum(worker.used for worker in ordered) / max(1, len(ordered))
    ranking = _ranking(digest, tuple(map(_id_of, ordered)))
    by_rank = map(ordered.__getitem__, ranking)
    fit = (worker for worker in by_rank if worker.used <= max(LOAD_BOUND * mean, worker.rows / 2))
    return tuple(worker.worker_id for worker in islice(fit, PREFERRED))


_id_of = attrgetter("worker_id")
