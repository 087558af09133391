"""The end of a worker that was told to stop: short work ends here, the rest goes on elsewhere."""

from __future__ import annotations

import math
from typing import Protocol

from worker.io.local_jobs.jobs import LocalJob, LocalJobs

# The last part of the grace, in which what is left is handed over: one of its turns after the other, so that those
# who take it over do not all prefill at once.
HAND_OVER_SHARE = 0.4
TURN_S = 0.1


class Holder(Protocol):
    """Who holds the jobs: worker.io.jobs.intake.Intake."""

    @property
    def held(self) -> LocalJobs:
        """The jobs."""

    async def empties_within(self, most_s: float) -> bool:
        """Wait until nothing is held; whether that is so."""

    def give_back(self, held: LocalJob) -> None:
        """Stop a job here, to go on elsewhere."""


async def drain(holder: Holder, drain_s: float) -> None:
    """Wait for what runs, then hand the rest over, what has longest to go first.

    Returns when the routers have all of it, or after `drain_s`.
    """
    hand_over_s = HAND_OVER_SHARE * drain_s
    if await holder.empties_within(drain_s - hand_over_s):
        return
    for left in range(max(1, round(hand_over_s / TURN_S)), 0, -1):
        jobs = sorted((held for held in holder.held.all() if held.running), key=_to_go, reverse=True)
        for held in jobs[: math.ceil(len(jobs) / left)]:
            holder.give_back(held)
        if await holder.empties_within(TURN_S):
            return


def _to_go(held: LocalJob) -> int:
    """The most tokens that a job may still make."""
    stopping = held.job.stopping
    return sum(stopping.max_tokens - choice.start - len(choice.ids) for choice in held.running)
