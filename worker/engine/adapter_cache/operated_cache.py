"""The adapter cache with the commands of operators: adapters brought in though no sequence waits for them, and kept.

Commands are carried out one after the other, each once some slot is empty or has an adapter that nobody waits for: no
sequence is delayed by one, and at most one adapter is held in memory for them.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TypeVar

from worker.engine.adapter_cache.cache import AdapterCache
from worker.engine.adapter_cache.loading import AdapterMemory, Loads
from worker.engine.adapter_cache.swap_budget import SwapBudget
from worker.engine.scheduling.residency import Arrivals
from worker.engine_api import AdapterSource
from worker.engine_api.stats import Removal

P = TypeVar("P")


class OperatedCache(AdapterCache[P]):
    """An AdapterCache that takes operators' commands."""

    def __init__(
        self,
        slots: int,
        memory: AdapterMemory[P],
        loads: Loads[P],
        host_bytes: int,
        budget: SwapBudget | None = None,
    ) -> None:
        super().__init__(slots, memory, loads, host_bytes, budget)
        self._commands: dict[str, AdapterSource] = {}
        self._under_way: str | None = None

    def warm_adapter(self, source: AdapterSource) -> None:
        """Bring an adapter into a slot when one can be had; one that can't be loaded is forgotten."""
        if source.digest not in self._slots:
            self._commands[source.digest] = source

    def pin_adapter(self, source: AdapterSource) -> None:
        """Bring an adapter into a slot and keep it there. Raises ValueError where no slot would be left for others."""
        self._slots.keep(source.digest)
        if source.digest in self._slots.draining:
            self._spare(source.digest)
        self.warm_adapter(source)

    def unpin_adapter(self, digest: str) -> None:
        """Undo pin_adapter: the adapter may leave like any other, and a command not yet begun is forgotten."""
        self._slots.kept.pop(digest, None)
        self._commands.pop(digest, None)

    def forget_others(self, kept: Container[str]) -> Removal:
        """Remove the adapters but those that are kept from host memory and slots; those in use count as left."""
        removed = left = 0
        for digest in [one for one in self._host.kept_digests if one not in kept]:
            self._host.drop(digest)
            removed += 1
        for digest in [one for one in self._slots.digests if one not in kept]:
            dropped = self._slots.drop(digest)
            removed, left = removed + dropped, left + (not dropped)
        coming = {*self._commands, *self._reads.wanted, *self._reads.loading, *self._host.held_digests}
        return Removal(removed, left + sum(one not in kept and one not in self._slots for one in coming))

    @property
    def kept(self) -> tuple[str, ...]:
        """Return the digests of the adapters that stay, also of those that are not there yet."""
        return tuple(self._slots.kept)

    def withdraw(self, digest: str) -> None:
        """See AdapterCache."""
        if digest != self._under_way:
            super().withdraw(digest)

    def poll(self, *, busy: bool = False) -> Arrivals:
        """See AdapterCache."""
        while self._under_way is None and self._commands and self._slots.has_room():
            digest = next(iter(self._commands))
            source = self._commands.pop(digest)
            if digest not in self._slots:
                self._under_way = digest
                self.request(source)
        return super().poll(busy=busy)

    def has_work(self) -> bool:
        """See AdapterCache."""
        return super().has_work() or (self._under_way is None and bool(self._commands) and self._slots.has_room())

    def _requested(self) -> set[str]:
        return super()._requested() | ({self._under_way} if self._under_way else set())

    def _lacking(self) -> list[str]:
        lacking, commanded = super()._lacking(), self._under_way
        if commanded is None or self._host.held(commanded) is None or commanded in self.demand.lacking:
            return lacking
        return [*lacking, commanded]

    def _take(self, digest: str, result: P | Exception) -> None:
        super()._take(digest, result)
        if isinstance(result, Exception) and digest == self._under_way:
            self._under_way = None

    def _drop_request(self, digest: str) -> None:
        super()._drop_request(digest)
        if digest == self._under_way:
            self._under_way = None
