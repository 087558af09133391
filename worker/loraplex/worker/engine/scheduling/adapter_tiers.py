"""The memory that adapters are brought to, and the tier of it that is the host's: what stays there, and what goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set
from typing import Generic, Protocol, TypeVar

from loraplex.worker.engine.scheduling.adapter_slots import require_integrity
from loraplex.worker.engine_api import AdapterSource

P = TypeVar("P")


class AdapterMemory(Protocol[P]):
    """Host memory and the device's slots. An exception of any method fails that adapter alone."""

    @property
    def transfers(self) -> bool:
        """Tell whether an adapter is copied to the device before it is installed."""

    def read(self, source: AdapterSource) -> P:
        """Read an adapter from its files to host memory, checked, cast and scaled; in a loader thread."""

    def transfer(self, prepared: P) -> P:
        """Copy an adapter to the device, though not to a slot; in a loader thread."""

    def install(self, prepared: P, slot: int) -> None:
        """Copy into a slot what `transfer` has returned; between steps, on the thread that steps."""

    def size(self, prepared: P) -> int:
        """Return the bytes as stored."""


class HostTier(Generic[P]):
    """Prepared adapters in host memory by digest, least recently used first out.

    Held ones stay: `bytes` is at most the budget, or `held_bytes` if that is more.
    """

    def __init__(self, budget: int, size: Callable[[P], int]) -> None:
        self.budget = budget
        self._size = size
        self._held: dict[str, P] = {}
        # Adapters that no sequence waits for; least recently used first.
        self._idle: OrderedDict[str, P] = OrderedDict()
        self.bytes = 0
        self.held_bytes = 0

    def held(self, digest: str) -> P | None:
        """Return an adapter that is held, or None."""
        return self._held.get(digest)

    def has_room_for(self, more: int, size: int, least: int) -> bool:
        """Tell whether so many more of this size may be held: within the budget, or up to `least` in any case."""
        return len(self._held) + more <= least or self.held_bytes + more * size <= self.budget

    def put(self, digest: str, prepared: P) -> None:
        """Take an adapter that is not here, and keep it while the budget allows."""
        self._idle[digest] = prepared
        self.bytes += self._size(prepared)
        self._trim()

    def hold(self, digest: str, prepared: P | None = None) -> bool:
        """Hold an adapter, so that it stays; `prepared` brings a new one. Return False where it is not here."""
        if prepared is not None:
            self.bytes += self._size(prepared)
        elif (prepared := self._idle.pop(digest, None)) is None:
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
            self._idle[digest] = prepared
            self._trim()

    def touch(self, digest: str) -> None:
        """Count an adapter as used until now."""
        if digest in self._idle:
            self._idle.move_to_end(digest)

    @property
    def kept_digests(self) -> Set[str]:
        """Return the digests of the adapters that nobody waits for."""
        return self._idle.keys()

    def drop(self, digest: str) -> None:
        """Remove an adapter that nobody waits for."""
        self.bytes -= self._size(self._idle.pop(digest))

    @property
    def held_digests(self) -> Set[str]:
        """Return the digests of the held adapters."""
        return self._held.keys()

    def check(self) -> None:
        """Raise AdapterIntegrityError unless the counts of bytes are right and within the budget."""
        held, idle_bytes = (sum(map(self._size, tier.values())) for tier in (self._held, self._idle))
        require_integrity(not self._held.keys() & self._idle.keys(), "an adapter is both held and kept in host memory")
        require_integrity(held == self.held_bytes, f"{held} bytes are held in host memory, {self.held_bytes} counted")
        require_integrity(
            held + idle_bytes == self.bytes, f"{held + idle_bytes} bytes are in host memory, {self.bytes} counted"
        )
        require_integrity(self.bytes <= max(self.budget, held), f"{self.bytes} bytes are over the host memory's budget")

    def _trim(self) -> None:
        while self.bytes > self.budget and self._idle:
            _, prepared = self._idle.popitem(last=False)
            self.bytes -= self._size(prepared)
