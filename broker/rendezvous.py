"""Which workers an adapter prefers: rendezvous hashing with bounded load.

Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998: each worker's weight for an adapter is a
hash of both, the highest comes first; one that comes or goes moves only its own adapters. The bound on load: Mirrokni
et al., Consistent hashing with bounded loads, 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

# So many workers may be preferred, each where those before it have no room.
PREFERRED = 3
# A worker is overloaded beyond so many times the mean load, and half of its rows: below that a row more costs little.
LOAD_BOUND = 1.25


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A live worker and the rows that it uses of its own."""

    worker_id: str
    used: int
    rows: int


@lru_cache(maxsize=4096)
def _ranking(digest: str, worker_ids: tuple[str, ...]) -> tuple[str, ...]:
    def weight(worker_id: str) -> bytes:
        return blake2b(f"{len(digest)}:{digest}{worker_id}".encode(), digest_size=8).digest()

    return tuple(sorted(worker_ids, key=weight, reverse=True))


def preferred(digest: str, workers: Sequence[WorkerLoad]) -> tuple[str, ...]:
    """The ids of the workers that an adapter prefers, the best first; none of them overloaded."""
    by_id = {worker.worker_id: worker for worker in workers}
    mean = sum(worker.used for worker in workers) / max(1, len(workers))
    ranking = _ranking(digest, tuple(sorted(by_id)))
    fit = (one for one in ranking if by_id[one].used <= max(LOAD_BOUND * mean, by_id[one].rows / 2))
    return tuple(worker_id for worker_id, _ in zip(fit, range(PREFERRED), strict=False))
