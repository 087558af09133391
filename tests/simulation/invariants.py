"""Watches a run for the design's invariants that nobody can see from outside: 5 (attempts) and 6 (fairness)."""

from __future__ import annotations

from collections.abc import Mapping

from loraplex.contracts.broker.messages import Job
from loraplex.contracts.broker.terms import ADAPTER_DIGITS, OUTPUT_WEIGHT, PROMPT_WEIGHT
from loraplex.router.dispatch.links import Frame, WorkerLink
from loraplex.router.dispatch.outbox import MIB
from tests.simulation.redis import SimulatedRedis
from tests.simulation.router import MIB_TOKENS


class Attempts:
    """Invariant 5: a frame of an older attempt, or of a worker not bound to the attempt, never reaches a client."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        # The newest attempt that any router has enqueued, by job.
        self._newest: dict[str, int] = {}
        # Jobs that a worker has had.
        self._claimed: set[str] = set()
        # Worker whose frame counted first, by job and attempt.
        self._bound: dict[tuple[str, int], str] = {}

    @property
    def attempts(self) -> int:
        """Count the attempts that were enqueued, over all jobs."""
        return sum(self._newest.values())

    def claimed(self, job: Job) -> None:
        """A worker has an attempt."""
        self._claimed.add(job.job_id)

    def enqueued(self, job: Job, *, leads: bool) -> None:
        """An attempt is in the queue; it `leads` where it goes before all newcomers."""
        has_begun = job.job_id in self._claimed or any(job.emitted.values()) or bool(job.done)
        if leads and not has_begun:
            self.faults.append(f"{job.job_id} attempt {job.attempt} goes before newcomers, and no worker had it")
        self._newest[job.job_id] = max(job.attempt, self._newest.get(job.job_id, 0))

    def accepted(self, link: WorkerLink, frame: Frame) -> None:
        """A frame changed what a client gets."""
        name = f"{frame.job_id} attempt {frame.attempt}"
        newest = self._newest.get(frame.job_id, 0)
        if frame.attempt < newest:
            self.faults.append(f"{name}: a frame was taken though attempt {newest} was in the queue")
        first = self._bound.setdefault((frame.job_id, frame.attempt), link.incarnation)
        if first != link.incarnation:
            self.faults.append(f"{name}: frames of {first} and of {link.incarnation} were taken")


def service_bound(prompt: float, answer: int, rows: int) -> float:
    """Return the most by which two tenants' service may differ, over any time in which both wait.

    `prompt`: the highest charge of a claim; `answer`: the most tokens of a job; `rows`: those of all workers.

    A claim takes a job of the tenant whose counter is lower. The counters differ from the service by tokens that are
    not reported yet, or not delivered: of each row those of the job that runs, and of the one that has just ended. So
    before the claim the tenant's lead is at most these; the claim adds its prompt, and until the tenant's next claim
    what still runs adds the rest of the same tokens. Each of the two may be ahead by so much. (In Sheng et al. the
    larger of prompt and memory is enough, because the memory has the prompts too.)
    """
    return 2 * (prompt + OUTPUT_WEIGHT * 2 * rows * answer)


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

    def claimed(self, job: Job, resident: str) -> None:
        """A worker took it; `resident` has the last digits of the worker's adapters."""
        if job.job_id not in self._known:
            self._known.add(job.job_id)
            cost = float(PROMPT_WEIGHT * len(job.prompt_ids))
            if job.adapter is not None and job.adapter.digest[-ADAPTER_DIGITS:] not in resident:
                cost += job.adapter.weight_bytes / MIB * MIB_TOKENS
            self._served[job.tenant] += cost / self._weights[job.tenant]
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
        waiting, names = self._redis.have_waiting(self._served), sorted(self._served)
        for index, first in enumerate(names):
            for second in names[index + 1 :]:
                pair = (first, second)
                if not (waiting[first] and waiting[second]):
                    self._leads.pop(pair, None)
                    continue
                lead = self._served[first] - self._served[second]
                lowest, highest = self._leads.get(pair, (lead, lead))
                self._leads[pair] = lowest, highest = min(lead, lowest), max(lead, highest)
                self.difference = max(self.difference, highest - lowest)
