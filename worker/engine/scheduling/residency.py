"""The adapter cache as the scheduler sees it; worker.engine.adapter_cache.cache is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from worker.engine.scheduling.adapter_demand import Demand
from worker.engine_api import AdapterSource
from worker.engine_api.stats import TierStats


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The requests that have ended: digests that can be pinned now, and those that could not be loaded."""

    arrived: tuple[str, ...]
    failed: tuple[tuple[str, Exception], ...]


class Residency(Protocol):
    """A cache of adapters in numbered slots. All calls come from the step thread."""

    @property
    def demand(self) -> Demand:
        """Return the demand of the waiting sequences, which the scheduler updates and the cache reads."""

    def request(self, source: AdapterSource) -> None:
        """Bring an adapter in, unless that is under way; poll reports when it is there."""

    def withdraw(self, digest: str) -> None:
        """Stop bringing in an adapter that nobody waits for any more."""

    def slot_of(self, digest: str) -> int | None:
        """Return an adapter's slot, or None where it can't be pinned now."""

    def pin(self, digest: str) -> int:
        """Keep an adapter in its slot until as many unpins; slot_of has just returned that slot."""

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
        """Return how many slots have an adapter."""

    @property
    def pinned(self) -> int:
        """Return how many slots are pinned."""

    @property
    def resident(self) -> tuple[str, ...]:
        """Return the digests of the adapters in the slots."""

    @property
    def tiers(self) -> TierStats:
        """Return what the tiers hold now."""
