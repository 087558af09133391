"""Watches a run for the design's invariants that nobody can see from outside: 5 (attempts) and 6 (fairness)."""

from __future__ import annotations

from collections.abc import Mapping

from broker.messages import Job
from broker.terms import OUTPUT_WEIGHT, PROMPT_WEIGHT
from router.dispatch.link import Frame, Link
from tests.simulation.redis import SimulatedRedis


class Attempts:
    """Invariant 5: a frame of an older attempt, or of a worker not bound to the attempt, never reaches a client."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        # The newest attempt that any router has enqueued, by job.
        self._newest: dict[str, int] = {}
        # Worker whose frame counted first, by job and attempt.
        self._bound: dict[tuple[str, int], str] = {}

    @property
    def attempts(self) -> int:
        """Count the attempts that were enqueued, over all jobs."""
        return sum(self._newest.values())

    def enqueued(self, job: Job) -> None:
        """An attempt is in the queue."""
        self._newest[job.job_id] = max(job.attempt, self._newest.get(job.job_id, 0))

    def accepted(self, link: Link, frame: Frame) -> None:
        """A frame changed what a client gets."""
        name = f"{frame.job_id} attempt {frame.attempt}"
        newest = self._newest.get(frame.job_id, 0)
        if frame.attempt < newest:
            self.faults.append(f"{name}: a frame was taken though attempt {newest} was in the queue")
        first = self._bound.setdefault((frame.job_id, frame.attempt), link.incarnation)
        if first != link.incarnation:
            self.faults.append(f"{name}: frames of {first} and of {link.incarnation} were taken")


class Shares:
    """Invariant 6: over any time in which two tenants have waiting work their service differs by a bounded amount."""

    def __init__(self, redis: SimulatedRedis, weights: Mapping[str, float]) -> None:
        self._redis = redis
        self._served = dict.fromkeys(weights, 0.0)
        self._weights = weights
        self._known: set[str] = set()
        # Lowest and highest lead of one over the other while both have had waiting work.
        self._leads: dict[tuple[str, str], tuple[float, float]] = {}
        self.difference = 0.0

    def claimed(self, job: Job) -> None:
        """A worker took it."""
        if job.job_id not in self._known:
            self._known.add(job.job_id)
            self._served[job.tenant] += PROMPT_WEIGHT * len(job.prompt_ids) / self._weights[job.tenant]
        self.look()

    def made(self, tenant: str, tokens: int) -> None:
        """A client's tokens."""
        self._served[tenant] += OUTPUT_WEIGHT * tokens / self._weights[tenant]
        self.look()

    def forget(self) -> None:
        """The counters are gone."""
        self._leads.clear()

    def look(self) -> None:
        """Follow the leads of all pairs."""
        waiting, names = self._redis.data.queue.waiting, sorted(self._served)
        for index, first in enumerate(names):
            for second in names[index + 1 :]:
                pair = (first, second)
                if not (waiting.queue(first) and waiting.queue(second)):
                    self._leads.pop(pair, None)
                    continue
                lead = self._served[first] - self._served[second]
                lowest, highest = self._leads.get(pair, (lead, lead))
                self._leads[pair] = lowest, highest = min(lead, lowest), max(lead, highest)
                self.difference = max(self.difference, highest - lowest)
