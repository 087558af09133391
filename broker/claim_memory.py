"""The memory of a worker's claims that found no job: which jobs need no second look, and for how long.

A claim that looked at many jobs in vain would look at the same ones again. Until it may find something else, the worker
rests: its claims look at newer arrivals alone, which cost Redis next to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from broker.messages import Capacity
from broker.terms import SCANS_PER_CLAIM

# Minimum number of jobs that a claim looked at in vain for a rest: fewer cost hardly more than the claim itself.
LOOKS_LIMIT = 16
# Seconds of rest for each job that was looked at in vain, and each live worker. Redis takes some 4 us for a look, so
# that the workers of a cell together take about 2% of a core, however many they are.
REST_PER_LOOK_S = 0.000_2
# Maximum seconds of a rest.
REST_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class ClaimPlan:
    """The extent of the next claim: after `seen`, only newer arrivals (`news_only`), or at most so many scans."""

    seen: int
    news_only: bool
    scans: int


class ClaimMemory:
    """The memory of one worker. `clock` returns seconds; the monotonic clock by default."""

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        *,
        looks_limit: int = LOOKS_LIMIT,
        rest_per_look_s: float = REST_PER_LOOK_S,
    ) -> None:
        self._clock = clock or time.monotonic
        self._looks_limit = looks_limit
        self._rest_per_look_s = rest_per_look_s
        # The number of the last arrival that needs no second look.
        self._seen = 0
        self._rests_until = -1.0
        self._kind: Hashable = None

    def plan(self, base_digest: str, capacity: Capacity, *, freed: bool) -> ClaimPlan:
        """Return the extent of the next claim. A worker that takes other kinds of jobs than before does not rest.

        `freed`: capacity has become free that a waiting job may need, which is worth one scan.
        """
        kind = (base_digest, capacity.max_tokens, capacity.max_rank, capacity.routers)
        if kind != self._kind:
            self._kind, self._seen, self._rests_until = kind, 0, -1.0
        # A full worker looks at few jobs.
        rests = capacity.rows > 0 and self._clock() < self._rests_until
        return ClaimPlan(self._seen, rests and not freed, 1 if rests else SCANS_PER_CLAIM)

    def note(
        self, plan: ClaimPlan, capacity: Capacity, *, found: bool, seen: int, looks: int, live_workers: int
    ) -> None:
        """Note whether a claim found jobs, and what the last scan of one that did not said of so many looks."""
        if capacity.rows < 1:
            return
        if found:
            if not plan.news_only:  # there may be more
                self._rests_until = -1.0
            return
        self._seen = seen
        if not plan.news_only and looks > self._looks_limit:
            rest_s = looks * max(1, live_workers) * self._rest_per_look_s
            self._rests_until = self._clock() + min(rest_s, REST_LIMIT_S)
