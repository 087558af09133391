"""The workers that an adapter prefers, by rendezvous hashing with bounded load.

Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998: each worker's weight for an adapter is a
hash of both, the highest comes first; one that comes or goes moves only its own adapters. The bound on load: Mirrokni
et al., Consistent hashing with bounded loads, 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from operator import attrgetter

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
