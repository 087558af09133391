"""The tenants' virtual counters of service, as broker/lua/include/tenant_counters.lua keeps them."""

from __future__ import annotations

from bisect import bisect_left, insort


class TenantCounters:
    """Each tenant's service, in charged tokens over its weight. A tenant with waiting jobs is active."""

    def __init__(self) -> None:
        self._active: dict[str, float] = {}
        # Counter and name of the active tenants; equal counters are ordered by the names' bytes, as in Redis.
        self._order: list[tuple[float, bytes]] = []
        self._idle: dict[str, float] = {}
        # The counter of the tenant that was active last.
        self._floor = 0.0

    def value(self, tenant: str) -> float:
        """Return a tenant's counter; the lowest for a tenant without one, or with a lower one."""
        lowest = self.lowest()
        return self._active.get(tenant, max(lowest, self._idle.get(tenant, lowest)))

    def lowest_active(self, skip: int, limit: int) -> list[tuple[float, str]]:
        """Return counter and name of at most `limit` active tenants, from the lowest counter on, after `skip`."""
        return [(counter, name.decode()) for counter, name in self._order[skip : skip + limit]]

    def lowest(self) -> float:
        """Return the lowest counter of an active tenant; without one, that of the tenant that was active last."""
        return self._order[0][0] if self._order else self._floor

    def activate(self, tenant: str) -> None:
        """Make a tenant active; an idle counter below the lowest is lifted to it."""
        if tenant in self._active:
            return
        lowest = self.lowest()
        counter = max(lowest, self._idle.pop(tenant, lowest))
        self._active[tenant] = counter
        insort(self._order, (counter, tenant.encode()))

    def deactivate(self, tenant: str) -> None:
        """Make a tenant idle whose last waiting job has left."""
        counter = self._active.pop(tenant)
        self._remove(counter, tenant)
        if not self._order:
            self._floor = counter
        if counter > self.lowest():
            self._idle[tenant] = counter

    def charge(self, tenant: str, cost: float) -> None:
        """Add to a tenant's counter."""
        counter = self._active.get(tenant)
        if counter is not None:
            self._remove(counter, tenant)
            self._active[tenant] = counter + cost
            insort(self._order, (counter + cost, tenant.encode()))
            return
        lowest = self.lowest()
        counter = max(lowest, self._idle.pop(tenant, lowest)) + cost
        if counter > lowest:
            self._idle[tenant] = counter

    def prune_idle(self) -> None:
        """Forget the counters of idle tenants that would be lifted anyway."""
        lowest = self.lowest()
        self._idle = {name: value for name, value in self._idle.items() if value > lowest}

    def _remove(self, counter: float, tenant: str) -> None:
        del self._order[bisect_left(self._order, (counter, tenant.encode()))]
