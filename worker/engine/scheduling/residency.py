"""Which adapters lie in device slots, as the scheduler sees it; worker.engine.adapter_cache.cache keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from worker.engine.scheduling.adapter_demand import Demand
from worker.engine_api import AdapterSource, TierStats


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What became of requests: digests that can be pinned now, and those that could not be loaded."""

    arrived: tuple[str, ...]
    failed: tuple[tuple[str, Exception], ...]


class Residency(Protocol):
    """A cache of adapters in numbered slots. All calls come from the step thread."""

    @property
    def demand(self) -> Demand:
        """What the waiting sequences want; the scheduler keeps it, the cache goes by it."""

    def request(self, source: AdapterSource) -> None:
        """Have it brought in; poll tells when it is there. Nothing happens where that is under way already."""

    def withdraw(self, digest: str) -> None:
        """Nobody waits for it any more."""

    def slot_of(self, digest: str) -> int | None:
        """Its slot, or None where it can't be pinned now."""

    def pin(self, digest: str) -> int:
        """Keep it in its slot until as many unpins; slot_of has just told that it can be pinned."""

    def unpin(self, digest: str) -> None:
        """Undo one pin."""

    def poll(self, *, busy: bool) -> Arrivals:
        """Put what has been loaded into slots; `busy`: sequences run, whose tokens that delays."""

    def has_work(self) -> bool:
        """Tell whether poll would do anything now."""

    def check(self, pins: Mapping[str, int]) -> None:
        """Raise an integrity error unless all parts agree and exactly these pins, by digest, are held."""

    @property
    def used(self) -> int:
        """Slots with an adapter."""

    @property
    def pinned(self) -> int:
        """Slots that are pinned."""

    @property
    def resident(self) -> tuple[str, ...]:
        """Digests of the adapters in the slots."""

    @property
    def tiers(self) -> TierStats:
        """What the tiers hold now."""
