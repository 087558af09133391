"""Adapters on their way from files to host memory and to the device: what is read, kept and copied next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set
from functools import partial
from itertools import islice
from typing import Generic, Protocol, TypeVar

from loraplex.worker.engine.scheduling.adapter_slots import WINDOW, Demand, require_integrity
from loraplex.worker.engine.scheduling.loader_threads import LoaderThreads
from loraplex.worker.engine_api import AdapterSource

P = TypeVar("P")
# Maximum number of copies on the device that wait for a slot, whatever the host budget says: they are held twice.
MAX_AHEAD = 2


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


class DeviceCopies(Generic[P]):
    """Copies of adapters to the device, beside the batch; where memory needs no transfer, there are none."""

    def __init__(self, memory: AdapterMemory[P], loads: LoaderThreads[P]) -> None:
        self._memory = memory
        self._loads = loads
        # A copy that is not complete yet is None.
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


class Reads(Generic[P]):
    """Adapters on their way from files to host memory, by digest."""

    def __init__(
        self,
        memory: AdapterMemory[P],
        loads: LoaderThreads[P],
        host: HostTier[P],
        transfers: DeviceCopies[P],
        demand: Demand,
    ) -> None:
        self._memory = memory
        self._loads = loads
        self._host = host
        self._transfers = transfers
        self._demand = demand
        # Adapters whose read has not begun.
        self.pending: dict[str, AdapterSource] = {}
        # Adapters that are being read, and whether they are still requested.
        self.loading: dict[str, bool] = {}
        self._oldest_next = False
        self._largest = 0

    @property
    def requested(self) -> list[str]:
        """Return the digests of the adapters that are still requested."""
        return [*self.pending, *(digest for digest, requested in self.loading.items() if requested)]

    def request(self, source: AdapterSource) -> None:
        """Read an adapter as soon as there is room for it."""
        if source.digest in self.loading:
            self.loading[source.digest] = True
        else:
            self.pending[source.digest] = source
            self.feed()

    def drop_request(self, digest: str) -> None:
        """Forget an adapter; one that is being read is kept in host memory, though not held."""
        self.pending.pop(digest, None)
        if digest in self.loading:
            self.loading[digest] = False

    def feed(self) -> None:
        """Start reads while a loader is free and host memory has room."""
        # Keep loaders free for copies to the device: slow files must not delay adapters that are in memory.
        most = self._loads.most - self._memory.transfers
        while self.pending and (ahead := len(self.loading) + 1) <= most:
            # A reservation of the largest so far for each load: it ends with the load, whatever comes of that.
            if not self._host.has_room_for(ahead, self._largest, MAX_AHEAD):
                return
            # An adapter whose copy nobody waits for any more is read again once that copy has ended.
            window = [digest for digest in islice(self.pending, WINDOW) if digest not in self._transfers]
            if not window:
                return
            # By turns the adapter for which most wait and the one that was requested first, so that none starves.
            digest = window[0] if self._oldest_next else max(window, key=self._demand.waiting_for)
            self._oldest_next = not self._oldest_next
            self.loading[digest] = True
            self._loads.start(digest, partial(self._memory.read, self.pending.pop(digest)))

    def end(self, digest: str, result: P | Exception) -> bool:
        """Put what a read has returned into host memory; return whether the adapter is still requested."""
        requested = self.loading.pop(digest)
        if not isinstance(result, Exception):
            self._largest = max(self._largest, self._memory.size(result))
            if requested:
                self._host.hold(digest, result)
                self._demand.lacks_slot(digest)
            else:
                self._host.put(digest, result)
        return requested
