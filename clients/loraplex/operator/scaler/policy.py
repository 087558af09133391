"""The policy of `loraplex scaler`, without I/O: how many workers a model needs. bench.autoscaling simulates it.

Work is in charged tokens: a prompt's token counts 1, an answer's 2, at the answer's full length. With
it, a few long jobs need as many workers as many short ones.

    of work = max(arriving / BUSY, arriving + waiting / time left for it) / rate of a worker, in work per second
    of rows = running rows / rows of a worker, the mean of ARRIVALS_S
    wanted  = the larger one, rounded up: at once where it grows, after FALL_S where it shrinks

The rate is measured while workers are busy: whatever makes them fast or slow, and however much shorter answers are than
their full length, is in it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

# Share of a worker's full rate that arrivals should take. What is left serves jobs that come while more workers start.
BUSY = 0.93
# Time in seconds over which arrivals are averaged: a shorter one follows chance, a longer one is late.
ARRIVALS_S = 60.0
# Time in seconds that a worker takes to start, about.
START_S = 60.0
# Time in seconds for which a want holds: workers are not stopped that may be needed again.
FALL_S = 300.0
# Time in seconds of work at full rate after which the measured rate of a worker has mostly forgotten what was before.
RATE_S = 120.0
# Weight of the first guess of that rate, as seconds of work at full rate.
GUESS_S = 10.0


@dataclass(frozen=True, slots=True)
class PoolRules:
    """The bounds of a model's workers, and what its jobs are promised: to wait at most `wait_s` for a worker.

    `worker_rate` is the first guess of a worker's work per second. A pool whose `least` is 0 has no worker after
    `idle_s` without work.
    """

    least: int
    most: int
    wait_s: float
    idle_s: float
    worker_rate: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a model's workers in one cell."""

    least: int
    most: int


def divide(wanted: int, cells: Mapping[str, Bounds]) -> dict[str, int]:
    """Divide a model's workers among its cells, by the most that each may have; each worker more goes to one cell."""
    workers = {cell: bounds.least for cell, bounds in cells.items()}
    while sum(workers.values()) < wanted and (room := [one for one in workers if workers[one] < cells[one].most]):
        workers[min(room, key=lambda cell: ((workers[cell] + 1) / cells[cell].most, cell))] += 1
    return workers


class CellSums:
    """A sum over cells that only grows, of numbers that only grow: but a cell may come or go, and lose its number."""

    def __init__(self) -> None:
        self._total = 0.0
        self._last: dict[str, float] = {}

    def add(self, numbers: Mapping[str, float]) -> float:
        """Take the numbers of the cells that answered; return the sum of their growth since the first look.

        Of a lower number than before, which a Redis has that lost its data or came back older, the growth is not known.
        """
        for cell, number in numbers.items():
            self._total += max(0.0, number - self._last.get(cell, number))
            self._last[cell] = number
        return self._total


@dataclass(frozen=True, slots=True)
class Observation:
    """A model at a time: its live workers and their rows, what waits, and sums of what has come and was claimed."""

    at_s: float
    workers: int
    rows_running: int
    rows_limit: int
    waiting_work: float
    oldest_wait_s: float
    arrived_work: float
    claimed_work: float

    @property
    def busy(self) -> float:
        """Return the share of the workers' rows that run a job; 1 where jobs wait for a row."""
        if self.waiting_work > 0:
            return 1.0
        return min(1.0, self.rows_running / self.rows_limit) if self.rows_limit else 0.0

    @property
    def has_work(self) -> bool:
        """Tell whether a job waits or runs."""
        return self.waiting_work > 0 or self.rows_running > 0


class WorkerRate:
    """Measures the work per second of a busy worker: a line through the origin, by least squares.

    The work that workers claimed in an interval is their rate times the part of the interval that they were busy.
    Nearly idle workers tell little of their rate, and count by the square of that part.
    """

    def __init__(self, guess: float) -> None:
        self._work, self._time_s = guess * GUESS_S, GUESS_S

    @property
    def value(self) -> float:
        """Return the work per second."""
        return self._work / self._time_s

    def observe(self, before: Observation, now: Observation) -> None:
        """Take an interval into account, unless workers came or went in it."""
        claimed, busy = now.claimed_work - before.claimed_work, min(before.busy, now.busy)
        if now.workers != before.workers or not now.workers:
            return
        time_s = now.at_s - before.at_s
        kept = math.exp(-time_s * busy**2 / RATE_S)
        self._work = self._work * kept + claimed / now.workers * busy
        self._time_s = self._time_s * kept + time_s * busy**2


class Pool:
    """Follows a model and says how many workers it needs."""

    def __init__(self, rules: PoolRules) -> None:
        self.rules = rules
        self.rate = WorkerRate(rules.worker_rate)
        self._recent: deque[Observation] = deque()
        # Wants of the last FALL_S, each lower than those before it.
        self._wants: deque[tuple[float, int]] = deque()
        self._worked_at_s = -math.inf

    def observe(self, now: Observation) -> int:
        """Return the workers that are wanted."""
        if not self._recent:  # a scaler that starts again keeps what there is, until it knows better
            self._want(now.at_s, now.workers)
            self._worked_at_s = now.at_s if now.workers else -math.inf
        else:
            self.rate.observe(self._recent[-1], now)
        if now.has_work or (self._recent and now.arrived_work > self._recent[-1].arrived_work):
            self._worked_at_s = now.at_s
        self._recent.append(now)
        while len(self._recent) > 2 and self._recent[1].at_s <= now.at_s - ARRIVALS_S:
            self._recent.popleft()
        if now.at_s - self._worked_at_s >= self.rules.idle_s and self.rules.least == 0:
            self._wants.clear()
            return 0
        self._want(now.at_s, math.ceil(self._needed(now) - 1e-9))
        return min(self.rules.most, max(self.rules.least, 1, self._wants[0][1]))

    def _needed(self, now: Observation) -> float:
        first, rate = self._recent[0], max(self.rate.value, 1e-9)
        arriving = (now.arrived_work - first.arrived_work) / max(now.at_s - first.at_s, 1.0)
        # A backlog that is gone when a worker has started needs none, unless its jobs have waited for long.
        left_s = max(self.rules.wait_s, START_S + self.rules.wait_s - now.oldest_wait_s)
        of_work = max(arriving / BUSY, arriving + now.waiting_work / left_s) / rate
        filled = [one.rows_running * one.workers / one.rows_limit for one in self._recent if one.rows_limit]
        return max(of_work, sum(filled) / len(filled) if filled else 0.0)

    def _want(self, at_s: float, workers: int) -> None:
        while self._wants and self._wants[-1][1] <= workers:
            self._wants.pop()
        self._wants.append((at_s, workers))
        while self._wants[0][0] <= at_s - FALL_S:
            self._wants.popleft()
