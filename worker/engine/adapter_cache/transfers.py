"""Copies of adapters to the device, beside the batch; where memory needs no transfer, there are none."""

from __future__ import annotations

from functools import partial
from typing import Generic, TypeVar

from worker.engine.adapter_cache.loading import AdapterMemory, Loads

P = TypeVar("P")

# Maximum number of copies on the device that wait for a slot, whatever the host budget says: they are held twice.
MAX_AHEAD = 2


class Transfers(Generic[P]):
    """Adapters on their way from host memory to a slot, by digest."""

    def __init__(self, memory: AdapterMemory[P], loads: Loads[P]) -> None:
        self._memory = memory
        self._loads = loads
        # None while the copy is under way.
        self._copies: dict[str, P | None] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, digest: str) -> bool:
        return digest in self._copies

    @property
    def any_under_way(self) -> bool:
        """Tell whether a copy is being made."""
        return None in self._copies.values()

    @property
    def copied(self) -> set[str]:
        """Return the digests of the copies that are complete."""
        return {digest for digest, copy in self._copies.items() if copy is not None}

    def installable(self, digest: str, held: P | None, *, first: bool) -> P | None:
        """Return what can be installed now of the adapter `held` in host memory; start its copy where one is needed.

        `first`: it is the most urgent one, which does not wait for the places of others.
        """
        if not self._memory.transfers:
            return held
        if digest not in self._copies and held is not None and (first or len(self._copies) < MAX_AHEAD):
            self._copies[digest] = None
            self._loads.start(digest, partial(self._memory.transfer, held))
        return self._copies.get(digest)

    def can_move(self, digest: str) -> bool:
        """Tell whether `installable` would return something or start a copy."""
        if not self._memory.transfers or self._copies.get(digest) is not None:
            return True
        return digest not in self._copies and len(self._copies) < MAX_AHEAD

    def complete(self, digest: str, copy: P) -> None:
        """Take a copy that has been made."""
        self._copies[digest] = copy

    def forget(self, digest: str) -> None:
        """Forget a copy that has failed, or that nobody waits for any more."""
        self._copies.pop(digest, None)

    def discard(self, digest: str) -> None:
        """Drop a complete copy; one that is under way is dropped when it ends."""
        if self._copies.get(digest) is not None:
            del self._copies[digest]
