"""The twin's tenants: virtual counters of service, in their order (see `broker.lua` for the same on Redis).

Sheng et al., Fairness in Serving Large Language Models, 2024 (VTC): of those with waiting work the one with the lowest
counter is next; a tenant that was idle is lifted to the lowest of those that were not.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class Counters:
    """What each tenant was served, in charged tokens over its weight."""

    def __init__(self) -> None:
        self._active: dict[str, float] = {}
        # Equal counters lie in the order of the names' bytes.
        self._order: list[tuple[float, bytes]] = []
        self._idle: dict[str, float] = {}
        self._floor = 0.0

    def of(self, tenant: str) -> float:
        """A tenant's counter; one that is not known stands at the lowest."""
        return self._active.get(tenant, self._idle.get(tenant, self.lowest()))

    def first(self, skip: int, most: int) -> list[tuple[float, str]]:
        """Tenants with waiting work from the lowest counter on."""
        return [(counter, name.decode()) for counter, name in self._order[skip : skip + most]]

    def lowest(self) -> float:
        """The lowest counter of a tenant with waiting jobs; without one, that of the last which had some."""
        return self._order[0][0] if self._order else self._floor

    def enter(self, tenant: str) -> None:
        """A tenant has waiting jobs now."""
        if tenant in self._active:
            return
        low = self.lowest()
        counter = max(low, self._idle.pop(tenant, low))
        self._idle = {name: value for name, value in self._idle.items() if value > low}
        self._active[tenant] = counter
        insort(self._order, (counter, tenant.encode()))

    def leave(self, tenant: str) -> None:
        """A tenant's last waiting job is gone."""
        counter = self._active.pop(tenant)
        self._remove(counter, tenant)
        if not self._order:
            self._floor = counter
        if counter > self.lowest():
            self._idle[tenant] = counter

    def charge(self, tenant: str, tokens: float) -> None:
        """Add to a counter."""
        counter = self._active.get(tenant)
        if counter is not None:
            self._remove(counter, tenant)
            self._active[tenant] = counter + tokens
            insort(self._order, (counter + tokens, tenant.encode()))
            return
        low = self.lowest()
        counter = self._idle.pop(tenant, low) + tokens
        if counter > low:
            self._idle[tenant] = counter

    def _remove(self, counter: float, tenant: str) -> None:
        del self._order[bisect_left(self._order, (counter, tenant.encode()))]
