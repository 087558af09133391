"""Watches a run for the shares of API keys within their tenant, where one has a weight (docs/guides/quotas.md)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from loraplex.contracts.broker.messages import Job
from tests.simulation.redis import SimulatedRedis

# A tenant's key in a priority; the key is empty for all calls without a weighted one.
Owner = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A waiting job with a turn; `length` is its work over its key's weight."""

    owner: Owner
    attempt: int
    turn: int
    length: float


class KeyShares:
    """Compares the work that is claimed of keys that wait, over their weights.

    A job that was passed over though its turn had come counts as claimed: it suited no worker then.
    """

    def __init__(self, redis: SimulatedRedis) -> None:
        self._redis = redis
        self._data = redis.server.data
        self._waiting: dict[str, _Waiting] = {}
        self._served: defaultdict[Owner, float] = defaultdict(float)
        self._longest: defaultdict[Owner, float] = defaultdict(float)
        # Lowest and highest lead of one key over another while both have waited.
        self._leads: dict[tuple[Owner, Owner], tuple[float, float]] = {}
        self.faults: list[str] = []
        # Number of comparisons.
        self.compared = 0

    def enqueued(self, job: Job) -> None:
        """An attempt is in the queue."""
        found = self._redis.find(job.job_id)
        if found is None or found.turn is None or found.attempt != job.attempt or job.job_id in self._waiting:
            return
        owner = found.tenant, found.priority, found.key if found.key_weight else ""
        length = found.work / (found.key_weight or 1)
        self._waiting[job.job_id] = _Waiting(owner, job.attempt, found.turn, length)
        self._longest[owner] = max(self._longest[owner], length)
        self.look()

    def claimed(self, job: Job) -> None:
        """A worker took it."""
        found = self._waiting.get(job.job_id)
        if found is not None and found.attempt == job.attempt:
            del self._waiting[job.job_id]
            self._served[found.owner] += found.length

    def look(self) -> None:
        """Follow the leads of all pairs of keys whose turn is still to come."""
        if not self._waiting:
            self._leads.clear()
            return
        self._forget(self._left())
        served, waits = self._served.copy(), set[Owner]()
        for one in self._waiting.values():
            if one.turn < self._redis.claimed_turn(*one.owner[:2]):
                served[one.owner] += one.length
            else:
                waits.add(one.owner)
        pairs = {pair for pair in combinations(sorted(waits), 2) if pair[0][:2] == pair[1][:2]}
        self._leads = {pair: lead for pair, lead in self._leads.items() if pair in pairs}
        for pair in pairs:
            self.compared += 1
            lead = served[pair[0]] - served[pair[1]]
            lowest, highest = self._leads.get(pair, (lead, lead))
            self._leads[pair] = lowest, highest = min(lead, lowest), max(lead, highest)
            # Goyal et al., theorem 1; the turns at both ends of a time are whole tokens.
            bound = self._longest[pair[0]] + self._longest[pair[1]] + 2
            if highest - lowest > bound:
                found = highest - lowest
                self.faults.append(f"the work of {pair[0]} and {pair[1]} differs by {found:g}, bound {bound:g}")

    def _left(self) -> set[Owner]:
        """Drop the jobs that have left without a claim, or with a claim that was lost; return whose they were."""
        if self._data is not self._redis.server.data:  # wiped, or rolled back
            self._data = self._redis.server.data
            self._leads.clear()
        left = set[Owner]()
        for job_id, one in tuple(self._waiting.items()):
            found = self._redis.find(job_id)
            if found is None or found.turn is None or found.attempt != one.attempt:
                left.add(one.owner)
                del self._waiting[job_id]
        return left

    def _forget(self, owners: Iterable[Owner]) -> None:
        for owner in owners:
            self._leads = {pair: lead for pair, lead in self._leads.items() if owner not in pair}
