"""The live routers, as broker/lua/include/routers.lua decides them."""

from __future__ import annotations

from broker import terms


class LiveRouters:
    """Routers live for ROUTER_TTL_MS after each beat; while no router beats, all of them are taken to live."""

    def __init__(self) -> None:
        self._until: dict[str, int] = {}

    def beat(self, router: str, now_ms: int) -> None:
        """Record a router's beat, unless the last one was just now.

        The first beat after an outage, or after the clock went back, gives all routers their full time again.
        """
        until = now_ms + terms.ROUTER_TTL_MS
        if until - terms.ROUTER_BEAT_MS < self._until.get(router, 0) <= until:
            return
        if self._are_quiet(now_ms) or max(self._until.values()) > until:
            self._until = dict.fromkeys(self._until, until)
        self._until[router] = until
        self._until = {name: until for name, until in self._until.items() if until > now_ms}

    def is_alive(self, router: str, now_ms: int) -> bool:
        """Return whether a router's jobs may still be claimed."""
        return self._until.get(router, 0) > now_ms or self._are_quiet(now_ms)

    def live(self, now_ms: int) -> list[str]:
        """Return the live routers, in the order of their last beats."""
        alive = [name for name in self._until if self.is_alive(name, now_ms)]
        return sorted(alive, key=lambda name: (self._until[name], name))

    def _are_quiet(self, now_ms: int) -> bool:
        if not self._until:
            return True
        return max(self._until.values()) - terms.ROUTER_TTL_MS + terms.ROUTERS_QUIET_MS < now_ms
