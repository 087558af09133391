"""The live workers of all models by their last census in Redis, which outages and losses of data must not empty."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from broker.connection import REDIS_DOWN
from broker.liveness import Census, Liveness
from broker.terms import WORKER_TTL_MS
from broker.worker_state import WorkerPhase, WorkerState

log = logging.getLogger(__name__)

# Interval in seconds between looks at the workers, and at the store.
LOOK_S = 0.5
# Time in seconds without an answer after which the router's health says that Redis is away: a worker's time to live.
AWAY_S = WORKER_TTL_MS / 1e3
# Timeout in seconds for a model's census: one that hangs ends AWAY_S after the last answer. A census over a new
# connection takes several round trips, and one that is given up closes its connection: a short timeout would go on for
# as long as Redis is slow.
ANSWER_S = AWAY_S - LOOK_S
# Time in seconds after an outage or a loss of data during which no worker counts as dead: all must beat again first.
NO_LAPSE_S = WORKER_TTL_MS / 1e3


class LiveWorkers:
    """The live workers, at most one look's interval stale."""

    def __init__(
        self,
        clock: Callable[[], float],
        answer_s: float = ANSWER_S,
        set_aside: Callable[[str], None] = lambda key: None,
    ) -> None:
        self._clock = clock
        self._answer_s = answer_s
        # Called with the name of each key that a census has set aside.
        self._set_aside = set_aside
        self._workers: dict[str, list[WorkerState]] = {}
        # Sizes of the workers that take new jobs: maximum tokens and rank, by model and base digest.
        self._sizes: dict[str, dict[str, set[tuple[int, int]]]] = {}
        # Server and data that each model's last census came from.
        self._servers: dict[str, str] = {}
        # True after a failed look; and the time of the last one that succeeded.
        self._failed, self._answered_at = False, clock()
        # Time until which no worker counts as dead.
        self._no_lapse_before = 0.0

    def of(self, model: str) -> list[WorkerState] | None:
        """Return a model's live workers; None before its first census."""
        return self._workers.get(model)

    def sizes(self, model: str, base_digest: str) -> set[tuple[int, int]] | None:
        """Return the sizes of the workers that take new jobs of a base model; None: there is no such worker."""
        return self._sizes.get(model, {}).get(base_digest)

    @property
    def redis_is_away(self) -> bool:
        """Tell whether Redis has answered no census for AWAY_S."""
        return self._clock() - self._answered_at >= AWAY_S

    async def look(self, models: Mapping[str, Liveness], reply_to: str) -> set[str] | None:
        """Take a census of each model; return the live incarnations, or None while no worker may count as dead.

        `reply_to`: the address of this router's relay, which is registered as live.
        """
        failures = await asyncio.gather(*(self._ask(name, liveness, reply_to) for name, liveness in models.items()))
        if "" in failures or not models:
            self._answered_at = self._clock()
        if failure := next(filter(None, failures), ""):
            self._no_lapse_before = self._clock() + NO_LAPSE_S
            if not self._failed:
                log.warning("Redis does not answer: %s", failure)
        elif self._failed:
            log.info("Redis answers again")
        self._failed = bool(failure)
        if self._clock() < self._no_lapse_before:
            return None
        return {state.incarnation for states in self._workers.values() for state in states}

    async def _ask(self, model: str, liveness: Liveness, reply_to: str) -> str:
        """Take the census of a model; return why that failed, or nothing."""
        try:
            async with asyncio.timeout(self._answer_s):
                self._count(model, await liveness.take_census(reply_to))
        except REDIS_DOWN as error:  # a timeout is one of them
            return str(error) or type(error).__name__
        return ""

    def _count(self, model: str, census: Census) -> None:
        """Take a census. Another server, or one that has lost its data, knows no worker yet: none counts as dead."""
        if self._servers.get(model, census.server) != census.server:
            log.warning("Redis restarted, failed over or lost its data: no worker counts as dead for %g s", NO_LAPSE_S)
            self._no_lapse_before = self._clock() + NO_LAPSE_S
        self._servers[model] = census.server
        for key in census.set_aside:
            self._set_aside(key)
        workers = census.workers
        if self._clock() < self._no_lapse_before:
            seen = {state.incarnation for state in workers}
            workers = [*workers, *(state for state in self._workers.get(model, ()) if state.incarnation not in seen)]
        self._workers[model] = workers
        sizes = self._sizes[model] = dict[str, set[tuple[int, int]]]()
        for state in workers:
            if state.phase is WorkerPhase.SERVING:
                sizes.setdefault(state.base_digest, set()).add((state.max_tokens, state.max_rank))
