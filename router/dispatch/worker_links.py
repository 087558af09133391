"""The relay links of a router by worker incarnation, and the incarnations that count as lost."""

from __future__ import annotations

import math
import time
from collections.abc import Set as AbstractSet

from router.dispatch.link import Link
from router.dispatch.timing import DispatchTiming


class WorkerLinks:
    """The links that are open now."""

    def __init__(self, timing: DispatchTiming | None = None) -> None:
        self._timing = timing or DispatchTiming()
        self._open: dict[str, Link] = {}
        # Since when an incarnation that has jobs of this router is not among the live ones in Redis.
        self._missing: dict[str, float] = {}

    @property
    def incarnations(self) -> AbstractSet[str]:
        """Return the incarnations that have an open link."""
        return self._open.keys()

    def up(self, link: Link) -> None:
        """Take a link that was opened; it replaces an earlier one of its incarnation."""
        self._open[link.incarnation] = link

    def down(self, link: Link) -> bool:
        """Forget a link that broke; returns whether its incarnation has no other one."""
        if self._open.get(link.incarnation) is not link:
            return False
        del self._open[link.incarnation]
        return True

    def lost(self, bound: AbstractSet[str], living: AbstractSet[str]) -> set[str]:
        """Return those of the incarnations with jobs, `bound`, that count as lost, given those that live by Redis.

        A lapse in Redis alone ends nobody: the worker may be cut off from Redis only, and its answers go on. So its
        link must be silent as well; workers with jobs send something every half second. One look is not enough either:
        a Redis that has just lost its data knows no worker until the next beats.
        """
        now = time.monotonic()
        self._missing = {missing: self._missing.get(missing, now) for missing in bound - living}
        return {
            missing
            for missing, since in self._missing.items()
            if now - since >= self._timing.liveness_grace_s and self._silent_s(missing, now) >= self._timing.silent_s
        }

    def _silent_s(self, incarnation: str, now: float) -> float:
        link = self._open.get(incarnation)
        return math.inf if link is None else now - link.heard_at
