"""The twin's routers: which of them live (see `broker.lua` for the same on Redis)."""

from __future__ import annotations

from broker import terms


class Routers:
    """A router lives for ROUTER_MS after each beat; while nobody beats nobody lapses."""

    def __init__(self) -> None:
        self._until: dict[str, int] = {}

    def beats(self, router: str, now_ms: int) -> None:
        """A router lives. After an outage all of them get their time again."""
        until = now_ms + terms.ROUTER_TTL_MS
        if self._quiet(now_ms):
            self._until = dict.fromkeys(self._until, until)
        self._until[router] = until
        self._until = {name: until for name, until in self._until.items() if until > now_ms}

    def lives(self, router: str, now_ms: int) -> bool:
        """Whether a router's jobs are still its own to have."""
        return self._until.get(router, 0) > now_ms or self._quiet(now_ms)

    def _quiet(self, now_ms: int) -> bool:
        return bool(self._until) and max(self._until.values()) - terms.ROUTER_TTL_MS + terms.ROUTERS_QUIET_MS < now_ms
