"""The homes of an adapter: the workers that its jobs prefer.

They are the first workers of a ranking by rendezvous hashing (Thaler and Ravishankar, Using name-based mappings to
increase hit rates, 1998): each worker's weight for an adapter is a hash of both, and the highest comes first. A worker
that comes or goes moves only its own adapters. The number of homes follows from the adapter's demand
(broker/lua/demand.lua). Jobs pass over a worker that is full, and over one that is overloaded and lacks the adapter
(Mirrokni et al., Consistent hashing with bounded loads, 2018).

A home that lacks the adapter is warmed first. Meanwhile jobs prefer the homes that have it, or a former home: so a
worker that starts takes adapters over without a job that waits for a load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from heapq import nlargest
from itertools import chain
from operator import attrgetter

from loraplex.contracts.broker.terms import ADAPTER_DIGITS

# Maximum number of preferred workers of a job; each counts where those before it have no free rows.
PREFERRED = 3
# Minimum number of workers, the first of the ranking, among which those are looked for that have the adapter: after a
# cluster has doubled, a former home is among them with a probability of 0.996.
CANDIDATES = 8
# Minimum number of workers of the ranking that is kept: where all of them are overloaded, a job prefers nobody.
RANKED = 64
# A worker is overloaded above this many times the mean load, if more than half of its rows are used: below that a row
# more costs little.
LOAD_BOUND = 1.25
_BITS = 2**64 - 1


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A live worker: its used rows and all its rows, the adapters on its device, and whether it has a free slot.

    Of adapters it has the last ADAPTER_DIGITS of the digests.
    """

    worker_id: str
    used: int
    rows: int
    adapters: Set[str] = frozenset()
    has_free_slot: bool = False
    fetch_fails: bool = False


@dataclass(frozen=True, slots=True)
class Preference:
    """The workers that a job prefers, the best first, and the homes that are to load its adapter for later jobs."""

    workers: tuple[str, ...]
    to_warm: tuple[str, ...] = ()


_id_of, _used_of = attrgetter("worker_id"), attrgetter("used")


@lru_cache(maxsize=16)
def _hashes(worker_ids: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(map(hash_of, worker_ids))


@lru_cache(maxsize=16_384)
def _ranking(digest: str, worker_ids: tuple[str, ...], count: int) -> tuple[int, ...]:
    """Return the indices of so many of `worker_ids`, ordered by falling weight."""
    # The hashes of both are mixed: hashing each pair of a thousand workers would take a router two ms a job.
    own = hash_of(digest)
    weights = [mixed(own ^ other) for other in _hashes(worker_ids)]
    return tuple(nlargest(count, range(len(weights)), key=weights.__getitem__))


def hash_of(name: str) -> int:
    """Return the hash of a worker's id or an adapter's digest, 64 bits."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def mixed(number: int) -> int:
    """Mix the bits of a number of 64 bits with Stafford's variant 13 of a finalizer; the weight of two hashes' XOR.

    Steele et al., Fast splittable pseudorandom number generators, 2014.
    """
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _BITS
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _BITS
    return number ^ (number >> 31)


class Roster:
    """The workers of a moment, from which jobs choose."""

    def __init__(self, workers: Iterable[WorkerLoad]) -> None:
        self._workers = sorted(workers, key=_id_of)
        self._ids = tuple(map(_id_of, self._workers))
        self._any_fails = any(worker.fetch_fails for worker in self._workers)
        self._mean_bound: float = LOAD_BOUND * sum(map(_used_of, self._workers)) / max(1, len(self._workers))

    def preferred(self, digest: str, homes: int = 1, turn: int = 0, failed: Collection[str] = ()) -> Preference:
        """Return what a job of an adapter with so many homes prefers; `turn` counts jobs, which homes take in turns.

        It prefers no worker where it has `failed`, nor one that can't fetch now and lacks the adapter.

        Of two homes in turn the one with fewer used rows is first: loads are old by half a second, and a job is not to
        follow all others to the one with the fewest. A single home is warmed only where that evicts no other adapter.
        """
        ranking = _ranking(digest, self._ids, max(RANKED, homes + CANDIDATES))
        digits = digest[-ADAPTER_DIGITS:]
        by_rank = [self._workers[place] for place in ranking]
        if failed:
            by_rank = [worker for worker in by_rank if worker.worker_id not in failed]
        if self._any_fails:
            able = [worker for worker in by_rank if not worker.fetch_fails or digits in worker.adapters]
            by_rank = able or by_rank
        first = by_rank[: max(homes, CANDIDATES)]
        have = [worker for worker in first if digits in worker.adapters]
        ready = [worker for worker in first[:homes] if digits in worker.adapters and worker.used < worker.rows]
        start = turn % max(1, len(ready))
        ready = ready[start:] + ready[:start]
        holders = (worker for worker in have if worker.used < worker.rows)
        others = (worker for worker in by_rank if not self._is_overloaded(worker))
        best = dict.fromkeys(map(_id_of, chain(sorted(ready[:2], key=_used_of), ready[2:PREFERRED], holders)))
        while len(best) < PREFERRED and (worker := next(others, None)) is not None:
            best[worker.worker_id] = None
        lacking = (worker for worker in first[:homes] if digits not in worker.adapters)
        to_warm = tuple(worker.worker_id for worker in lacking if homes > 1 or worker.has_free_slot)
        return Preference(tuple(best)[:PREFERRED], to_warm if have else ())

    def _is_overloaded(self, worker: WorkerLoad) -> bool:
        return worker.used > max(self._mean_bound, worker.rows / 2)
