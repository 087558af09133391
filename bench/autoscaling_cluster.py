"""A model's workers in virtual time, whose number a rule sets: for bench.autoscaling.

Jobs wait in one line for a row of a worker. A worker that starts is paid for and takes no jobs yet; one that stops
takes no more jobs and is paid for until its last one ends.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from loraplex.contracts.broker.terms import OUTPUT_WEIGHT, PROMPT_WEIGHT
from loraplex.operator.scaler.policy import Observation
from loraplex.operator.scaler.settings import LOOK_S

# Rows of a worker, and time in seconds from its order until it takes jobs: a pod that loads a model of some GB.
ROWS, START_S = 4, 60.0
# Interval in seconds at which Kubernetes' autoscaler asks for the wanted workers.
SYNC_S = 15.0
# Maximum time in seconds that a job should wait for a row.
WAIT_S = 10.0
# Time of an answer's token over that of a prompt's, which is quicker because a prompt's are computed together.
_TOKEN_TIME = 20
# Lengths that clients ask for, as max_tokens: the least that the answer fits into.
_ASKED = (128, 512, 2048)

# The wanted workers, from what the scaler sees and the number of waiting jobs.
Rule = Callable[[Observation, int], int]


@dataclass(frozen=True, slots=True)
class TimedJob:
    """A job: when it comes, how long a row computes it, and its work as the queue counts it."""

    at_s: float
    runs_s: float
    work: int


@dataclass
class Outcome:
    """A rule's result: `late` jobs waited longer than WAIT_S; `sizes` are the wanted workers at each sync."""

    jobs: int = 0
    late: int = 0
    late_at_s: list[float] = field(default_factory=list)
    worker_s: float = 0.0
    sizes: list[int] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    @property
    def attainment(self) -> float:
        """Return the share of jobs that waited at most WAIT_S."""
        return 1 - self.late / max(1, self.jobs)

    @property
    def turns(self) -> int:
        """Return how often the number of workers turned from growing to shrinking, or back: its oscillation."""
        steps = [after - before for before, after in pairwise(self.sizes) if after != before]
        return sum(one * other < 0 for one, other in pairwise(steps))


def jobs_of(lengths: Sequence[tuple[float, int, int]], mean_workers: float) -> list[TimedJob]:
    """Return jobs of (arrival in s, prompt, answer), on workers so fast that the mean load is `mean_workers`."""
    seconds = lengths[-1][0] - lengths[0][0]
    costs = [prompt + _TOKEN_TIME * answer for _, prompt, answer in lengths]
    pace = mean_workers * ROWS * seconds / sum(costs)
    return [
        TimedJob(
            at_s - lengths[0][0],
            pace * cost,
            PROMPT_WEIGHT * prompt
            + OUTPUT_WEIGHT * next((most for most in _ASKED if most >= answer), max(answer, _ASKED[-1])),
        )
        for (at_s, prompt, answer), cost in zip(lengths, costs, strict=True)
    ]


class Workers:
    """The workers and the line before them, from time 0 until all jobs have begun."""

    def __init__(self, jobs: Sequence[TimedJob], rule: Rule, first: int, start_s: float = START_S) -> None:
        self._jobs, self._rule, self._start_s = jobs, rule, start_s
        self._ready = first
        self._starting: deque[float] = deque()
        self._ends: list[float] = []
        self._line: deque[TimedJob] = deque()
        self._arrived = self._waiting = 0
        self._now_s = 0.0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Simulate; return what the rule has reached."""
        look_at, sync_at, coming = LOOK_S, 0.0, 0
        wanted = self._ready
        while coming < len(self._jobs) or self._line:
            arrival = self._jobs[coming].at_s if coming < len(self._jobs) else math.inf
            end = self._ends[0] if self._ends else math.inf
            start = self._starting[0] if self._starting else math.inf
            self._pass_until(min(arrival, end, start, look_at))
            if self._now_s == end:
                heapq.heappop(self._ends)
            elif self._now_s == start:
                self._starting.popleft()
                self._ready += 1
            elif self._now_s == arrival:
                self._line.append(self._jobs[coming])
                self._arrived += self._jobs[coming].work
                self._waiting += self._jobs[coming].work
                coming += 1
            else:
                look_at += LOOK_S
                wanted = self._rule(self._observation(), len(self._line))
                if self._now_s >= sync_at:
                    sync_at += SYNC_S
                    self._scale(wanted)
            while self._line and len(self._ends) < self._ready * ROWS:
                self._begin(self._line.popleft())
        return self.outcome

    def _pass_until(self, at_s: float) -> None:
        paid = max(self._ready, math.ceil(len(self._ends) / ROWS)) + len(self._starting)
        self.outcome.worker_s += paid * (at_s - self._now_s)
        self._now_s = at_s

    def _begin(self, job: TimedJob) -> None:
        self._waiting -= job.work
        wait_s = self._now_s - job.at_s
        self.outcome.jobs += 1
        self.outcome.waits_s.append(wait_s)
        if wait_s > WAIT_S:
            self.outcome.late += 1
            self.outcome.late_at_s.append(job.at_s)
        heapq.heappush(self._ends, self._now_s + job.runs_s)

    def _observation(self) -> Observation:
        oldest_s = self._now_s - self._line[0].at_s if self._line else 0.0
        return Observation(
            self._now_s,
            self._ready,
            len(self._ends),
            self._ready * ROWS,
            self._waiting,
            oldest_s,
            self._arrived,
            self._arrived - self._waiting,
        )

    def _scale(self, wanted: int) -> None:
        while self._ready + len(self._starting) > wanted:
            if self._starting:
                self._starting.pop()
            else:
                self._ready -= 1
        while self._ready + len(self._starting) < wanted:
            if self._start_s:
                self._starting.append(self._now_s + self._start_s)
            else:
                self._ready += 1
        self.outcome.sizes.append(wanted)
