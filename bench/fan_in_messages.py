"""The messages that one router gets from many workers, in virtual time: how many, how large, and how long ids wait.

A worker makes one token of each of its rows after every step. The rows' jobs belong to the routers alike, so that a
router sees `rows / routers` of them at each worker, which begin at random and have answers of random length. A message
goes at once where it has the first ids or the end of an answer; other ids wait until the interval since the last
message is over, as in worker.io.relay.frames.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Fleet:
    """A cluster: `answer_tokens` is the mean length of an answer, `seconds` the time that is simulated."""

    workers: int = 200
    routers: int = 20
    rows: int = 32
    steps_per_s: float = 40.0
    answer_tokens: int = 200
    seconds: float = 20.0


@dataclass
class Traffic:
    """The traffic of one router. `longest_wait_ms`: the longest that ids waited for their message."""

    seconds: float
    messages: int = 0
    frames: int = 0
    tokens: int = 0
    longest_wait_ms: float = 0.0

    @property
    def messages_per_s(self) -> float:
        """Return the messages a second from all workers."""
        return self.messages / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens a second from all workers."""
        return self.tokens / self.seconds

    @property
    def frames_of_message(self) -> float:
        """Return the mean number of frames in a message."""
        return self.frames / self.messages

    @property
    def tokens_of_frame(self) -> float:
        """Return the mean number of tokens in a frame."""
        return self.tokens / self.frames


def simulate(fleet: Fleet, interval_ms: float, seed: int = 1) -> Traffic:
    """Return what one of the routers gets from all workers, when each waits this long between messages."""
    chance, traffic = random.Random(seed), Traffic(fleet.seconds)
    for _ in range(fleet.workers):
        _Pair(fleet, interval_ms / 1e3, chance, traffic).run()
    return traffic


class _Pair:
    """A worker and the router: the jobs of this router at that worker, and the messages about them."""

    def __init__(self, fleet: Fleet, interval_s: float, chance: random.Random, traffic: Traffic) -> None:
        self._fleet = fleet
        self._interval_s = interval_s
        self._chance = chance
        self._traffic = traffic
        self._sent_at = -math.inf
        # Tokens that wait, by job, and since when.
        self._pending: dict[int, int] = {}
        self._pending_since = 0.0

    def run(self) -> None:
        """Run all steps; the worker's first one is at a random moment."""
        fleet, chance = self._fleet, self._chance
        step_s, names = 1 / fleet.steps_per_s, iter(range(1 << 62))
        mean = fleet.rows / fleet.routers
        # Tokens that each running job still makes.
        jobs = {next(names): self._length() for _ in range(_poisson(chance, mean))}
        at = chance.random() * step_s
        while at < fleet.seconds:
            self._send_if_due(at)
            began = {next(names): self._length() for _ in range(_poisson(chance, mean / fleet.answer_tokens))}
            jobs |= began
            for job in jobs:
                self._pending_since = self._pending_since if self._pending else at
                self._pending[job] = self._pending.get(job, 0) + 1
                jobs[job] -= 1
            ended = [job for job, left in jobs.items() if not left]
            for job in ended:
                del jobs[job]
            if self._pending and (began or ended or at >= self._sent_at + self._interval_s):
                self._send(at)
            at += step_s

    def _send_if_due(self, before: float) -> None:
        """Send what waits if the interval ends before this moment."""
        due = self._sent_at + self._interval_s
        if self._pending and due < before:
            self._send(due)

    def _send(self, at: float) -> None:
        traffic = self._traffic
        traffic.messages += 1
        traffic.frames += len(self._pending)
        traffic.tokens += sum(self._pending.values())
        traffic.longest_wait_ms = max(traffic.longest_wait_ms, (at - self._pending_since) * 1e3)
        self._pending = {}
        self._sent_at = at

    def _length(self) -> int:
        """Draw the length of an answer: geometric, so that what is left of one has the same distribution."""
        return 1 + int(math.log(1.0 - self._chance.random()) / math.log(1 - 1 / self._fleet.answer_tokens))


def _poisson(chance: random.Random, mean: float) -> int:
    """Draw by Knuth's method: the means here are small."""
    count, product, least = 0, chance.random(), math.exp(-mean)
    while product > least:
        count += 1
        product *= chance.random()
    return count
