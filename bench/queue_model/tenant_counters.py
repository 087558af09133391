"""The tenants' virtual counters of service, as broker/lua/include/tenant_counters.lua keeps them."""

from __future__ import annotations

from bisect import bisect_left, insort

from broker.terms import COUNTERS_LIMIT, LIFTS_LIMIT, LIFTS_PER_TOKEN


class TenantCounters:
    """Each tenant's service, in charged tokens over its weight. A tenant with waiting jobs is active."""

    def __init__(self) -> None:
        self._active: dict[str, float] = {}
        # Counter and name of the active tenants; equal counters are ordered by the names' bytes, as in Redis.
        self._order: list[tuple[float, bytes]] = []
        self._idle: dict[str, float] = {}
        # The counter of the tenant that was active last.
        self._floor = 0.0
        # The counter that the next idle tenant is lifted to; 0 where no tenant is active.
        self._next_lift = 0.0

    def value(self, tenant: str) -> float:
        """Return a tenant's counter; the lowest for a tenant without one, or with a lower one."""
        lowest = self.lowest()
        return self._active.get(tenant, max(lowest, self._idle.get(tenant, lowest)))

    def lowest_active(self, skip: int, limit: int) -> list[tuple[float, str]]:
        """Return counter and name of at most `limit` active tenants, from the lowest counter on, after `skip`."""
        return [(counter, name.decode()) for counter, name in self._order[skip : skip + limit]]

    def count_active(self) -> int:
        """Return the number of active tenants."""
        return len(self._active)

    def lowest(self) -> float:
        """Return the lowest counter of an active tenant; without one, that of the tenant that was active last."""
        return self._order[0][0] if self._order else self._floor

    def activate(self, tenant: str) -> None:
        """Make a tenant active; an idle counter below the lowest is lifted to it."""
        if tenant in self._active:
            return
        lowest = self.lowest()
        counter = self._idle.pop(tenant, lowest)
        if counter <= lowest:
            counter = self._lift(lowest) if self._active else lowest
        self._active[tenant] = counter
        insort(self._order, (counter, tenant.encode()))

    def _lift(self, lowest: float) -> float:
        """Return the counter of a tenant that is lifted: above the lowest, and above those that were lifted before."""
        counter = self._next_lift
        if not lowest < counter <= lowest + LIFTS_LIMIT / LIFTS_PER_TOKEN:
            counter = lowest + 1 / LIFTS_PER_TOKEN
        self._next_lift = counter + 1 / LIFTS_PER_TOKEN
        return counter

    def deactivate(self, tenant: str) -> None:
        """Make a tenant idle whose last waiting job has left."""
        counter = self._active.pop(tenant)
        self._remove(counter, tenant)
        if not self._order:
            self._floor, self._next_lift = counter, 0.0
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

    def forget_idle(self, tenant: str) -> None:
        """Forget the counter of an idle tenant."""
        self._idle.pop(tenant, None)

    def rebase(self) -> None:
        """Subtract the lowest counter from all where one is beyond the limit; one that still is becomes the lowest."""
        lowest = self.lowest()
        if max([lowest, *self._active.values(), *self._idle.values()]) <= COUNTERS_LIMIT:
            return

        def rebased(counters: dict[str, float]) -> dict[str, float]:
            leads = {tenant: counter - lowest for tenant, counter in counters.items()}
            return {tenant: lead if 0 < lead <= COUNTERS_LIMIT else 0.0 for tenant, lead in leads.items()}

        self._active, self._idle, self._floor = rebased(self._active), rebased(self._idle), 0.0
        self._order = sorted((counter, tenant.encode()) for tenant, counter in self._active.items())

    def prune_idle(self) -> None:
        """Forget the counters of idle tenants that would be lifted anyway."""
        lowest = self.lowest()
        self._idle = {name: value for name, value in self._idle.items() if value > lowest}

    def _remove(self, counter: float, tenant: str) -> None:
        del self._order[bisect_left(self._order, (counter, tenant.encode()))]
