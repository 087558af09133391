"""Reads of adapters from files to host memory: which adapter is read next, and when there is room for it."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from worker.engine.adapter_cache.host_tier import HostTier
from worker.engine.adapter_cache.loading import AdapterMemory, Loads
from worker.engine.adapter_cache.transfers import MAX_AHEAD, Transfers
from worker.engine.scheduling.adapter_demand import WINDOW, Demand
from worker.engine_api import AdapterSource

P = TypeVar("P")


class Reads(Generic[P]):
    """Adapters on their way from files to host memory, by digest."""

    def __init__(
        self, memory: AdapterMemory[P], loads: Loads[P], host: HostTier[P], transfers: Transfers[P], demand: Demand
    ) -> None:
        self._memory = memory
        self._loads = loads
        self._host = host
        self._transfers = transfers
        self._demand = demand
        # Adapters whose read has not begun.
        self.wanted: dict[str, AdapterSource] = {}
        # Adapters that are being read, and whether they are still requested.
        self.loading: dict[str, bool] = {}
        self._oldest_next = False
        self._largest = 0

    @property
    def requested(self) -> list[str]:
        """Return the digests of the adapters that are still requested."""
        return [*self.wanted, *(digest for digest, requested in self.loading.items() if requested)]

    def request(self, source: AdapterSource) -> None:
        """Read an adapter as soon as there is room for it."""
        if source.digest in self.loading:
            self.loading[source.digest] = True
        else:
            self.wanted[source.digest] = source
            self.feed()

    def drop_request(self, digest: str) -> None:
        """Forget an adapter; one that is being read is kept in host memory, though not held."""
        self.wanted.pop(digest, None)
        if digest in self.loading:
            self.loading[digest] = False

    def feed(self) -> None:
        """Start reads while a loader is free and host memory has room."""
        # Keep loaders free for copies to the device: slow files must not delay adapters that are in memory.
        most = self._loads.most - self._memory.transfers
        while self.wanted and (ahead := len(self.loading) + 1) <= most:
            # A reservation of the largest so far for each load: it ends with the load, whatever comes of that.
            if not self._host.has_room_for(ahead, self._largest, MAX_AHEAD):
                return
            # An adapter whose copy nobody waits for any more is read again once that copy has ended.
            window = [digest for digest in islice(self.wanted, WINDOW) if digest not in self._transfers]
            if not window:
                return
            # By turns the adapter for which most wait and the one that was requested first, so that none starves.
            digest = window[0] if self._oldest_next else max(window, key=self._demand.waiting_for)
            self._oldest_next = not self._oldest_next
            self.loading[digest] = True
            self._loads.start(digest, partial(self._memory.read, self.wanted.pop(digest)))

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
