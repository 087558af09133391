"""Finds live workers that do not reach this router's relay, and so claim none of its jobs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from broker.worker_state import WorkerState
from router.dispatch.worker_links import WorkerLinks
from router.metrics import RouterMetrics
from rpc.errors import Unavailable

log = logging.getLogger(__name__)

# Time in seconds that a live worker may be without a link to this router before it counts as not reaching it. Longer
# than a dead worker is listed in Redis (its time to live of 3 s, and a look): its death is no sign of a bad address.
UNREACHED_S = 4.0


class RelayReach:
    """The live workers that have no link to one router."""

    def __init__(self, metrics: RouterMetrics | None = None, *, clock: Callable[[], float] | None = None) -> None:
        self.links = WorkerLinks()
        self._metrics = metrics or RouterMetrics()
        self._clock = clock or time.monotonic
        # Address of this router's relay, as workers are told; set once it listens.
        self.address = ""
        # Since when a live worker, by its incarnation, has no link.
        self._unlinked_since: dict[str, float] = {}
        self._last_logged: frozenset[str] = frozenset()
        # Models whose live workers all have no link, and these workers' incarnations.
        self._cut_off: dict[str, frozenset[str]] = {}
        self._some_model_reached = True

    def linked(self, states: Sequence[WorkerState]) -> list[WorkerState]:
        """Return the workers that may claim jobs of this router; one of an older version dials when it has claimed."""
        open_links = self.links.incarnations
        return [state for state in states if not state.keeps_links or state.incarnation in open_links]

    def look(self, serving: Mapping[str, Sequence[WorkerState]]) -> list[str]:
        """Take the live workers of each model; return the models whose workers have all had no link for long."""
        now, states = self._clock(), [state for of_model in serving.values() for state in of_model]
        linked = {state.incarnation for state in self.linked(states)}
        unlinked = {state.incarnation: state.worker_id for state in states if state.incarnation not in linked}
        self._unlinked_since = {one: self._unlinked_since.get(one, now) for one in unlinked}
        late = frozenset(one for one, since in self._unlinked_since.items() if now - since >= UNREACHED_S)
        self._metrics.unlinked_workers.set(len(late))
        for incarnation in sorted(late - self._last_logged):
            log.warning(
                "worker %s is alive and has had no link to this router's relay at %s for %g s, so it claims no jobs of "
                "this router: can it reach that address? --relay-advertise sets it",
                *(unlinked[incarnation], self.address, UNREACHED_S),
            )
        self._last_logged = late
        found = {name: frozenset(state.incarnation for state in of_model) for name, of_model in serving.items()}
        cut_off = {name: incarnations for name, incarnations in found.items() if incarnations and incarnations <= late}
        for name in sorted(cut_off.keys() ^ self._cut_off.keys()):
            if name in cut_off:
                log.error("no worker of %s reaches this router's relay at %s: requests are refused", name, self.address)
            else:
                log.info("requests for %s are not refused for want of a link any more", name)
        self._cut_off = cut_off
        self._some_model_reached = not cut_off or any(found[name] for name in found.keys() - cut_off.keys())
        return sorted(cut_off)

    def forget(self) -> None:
        """Judge nobody for now: it is not known which workers live."""
        self._unlinked_since, self._cut_off, self._some_model_reached = {}, {}, True

    def check(self, model: str) -> None:
        """Raise Unavailable where no worker could claim a job of the model."""
        cut_off = self._cut_off.get(model)
        if cut_off is not None and cut_off.isdisjoint(self.links.incarnations):
            raise self.refusal(model)

    def refusal(self, model: str) -> Unavailable:
        """Return, and count, the error of a request that no worker can claim."""
        self._metrics.unreachable.inc()
        message = f"no worker of {model} reaches this router's relay at {self.address}"
        return Unavailable(message, reason="RELAY_UNREACHABLE")

    def waits_for(self) -> str:
        """Return what is missing for a model to be served; empty: nothing."""
        return "" if self._some_model_reached else f"a worker that reaches this router's relay at {self.address}"
