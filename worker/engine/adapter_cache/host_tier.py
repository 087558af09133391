"""Adapters in host memory, ready for the device: least recently used first out, within a budget in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set
from typing import Generic, TypeVar

from worker.engine.adapter_cache.integrity import require_integrity

P = TypeVar("P")


class HostTier(Generic[P]):
    """Prepared adapters by digest. Held ones stay: `bytes` is at most the budget, or `held_bytes` if that is more."""

    def __init__(self, budget: int, size: Callable[[P], int]) -> None:
        self.budget = budget
        self._size = size
        self._held: dict[str, P] = {}
        # Nobody waits for these; least recently used first.
        self._kept: OrderedDict[str, P] = OrderedDict()
        self.bytes = 0
        self.held_bytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._held or digest in self._kept

    def held(self, digest: str) -> P | None:
        """Return an adapter that is held, or None."""
        return self._held.get(digest)

    def has_room_for(self, more: int, size: int, least: int) -> bool:
        """Tell whether so many more of this size may be held: within the budget, or up to `least` in any case."""
        return len(self._held) + more <= least or self.held_bytes + more * size <= self.budget

    def put(self, digest: str, prepared: P) -> None:
        """Take an adapter that is not here, and keep it while the budget allows."""
        self._kept[digest] = prepared
        self.bytes += self._size(prepared)
        self._trim()

    def hold(self, digest: str, prepared: P | None = None) -> bool:
        """Hold an adapter, so that it stays; `prepared` brings a new one. Return False where it is not here."""
        if prepared is not None:
            self.bytes += self._size(prepared)
        elif (prepared := self._kept.pop(digest, None)) is None:
            return digest in self._held
        self._held[digest] = prepared
        self.held_bytes += self._size(prepared)
        self._trim()
        return True

    def let_go(self, digest: str) -> None:
        """Undo hold: an adapter that is held may leave, as the most recently used one."""
        prepared = self._held.pop(digest, None)
        if prepared is not None:
            self.held_bytes -= self._size(prepared)
            self._kept[digest] = prepared
            self._trim()

    def touch(self, digest: str) -> None:
        """Count an adapter as used until now."""
        if digest in self._kept:
            self._kept.move_to_end(digest)

    @property
    def kept_digests(self) -> Set[str]:
        """Return the digests of the adapters that nobody waits for."""
        return self._kept.keys()

    def drop(self, digest: str) -> None:
        """Remove an adapter that nobody waits for."""
        self.bytes -= self._size(self._kept.pop(digest))

    @property
    def held_digests(self) -> Set[str]:
        """Return the digests of the held adapters."""
        return self._held.keys()

    def check(self) -> None:
        """Raise AdapterIntegrityError unless the counts of bytes are right and within the budget."""
        held, kept = (sum(map(self._size, tier.values())) for tier in (self._held, self._kept))
        require_integrity(not self._held.keys() & self._kept.keys(), "an adapter is both held and kept in host memory")
        require_integrity(held == self.held_bytes, f"{held} bytes are held in host memory, {self.held_bytes} counted")
        require_integrity(held + kept == self.bytes, f"{held + kept} bytes are in host memory, {self.bytes} counted")
        require_integrity(self.bytes <= max(self.budget, held), f"{self.bytes} bytes are over the host memory's budget")

    def _trim(self) -> None:
        while self.bytes > self.budget and self._kept:
            _, prepared = self._kept.popitem(last=False)
            self.bytes -= self._size(prepared)
