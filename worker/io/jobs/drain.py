"""The drain of a worker that was told to stop: short jobs end here, the others are given back."""

from __future__ import annotations

import math
from typing import Protocol

from worker.io.local_jobs.jobs import LocalJob, LocalJobs

# Share of the drain's time, at its end, in which the jobs that are left are given back: a part of them every TURN_S, so
# that the workers that take them over do not all prefill at once.
GIVE_BACK_SHARE = 0.4
# Seconds between two parts.
TURN_S = 0.1


class DrainedJobs(Protocol):
    """The jobs to drain: worker.io.jobs.results.Results."""

    @property
    def jobs(self) -> LocalJobs:
        """Return the local jobs."""

    async def empties_within(self, timeout_s: float) -> bool:
        """Wait until no job is left; returns whether that is so."""

    def give_back(self, local: LocalJob) -> None:
        """Stop a job here, to go on elsewhere."""


async def drain(drained: DrainedJobs, drain_s: float) -> None:
    """Wait for the jobs that run, then give the others back, those with the most tokens to go first.

    Returns when the routers have all of them, or after `drain_s`.
    """
    give_back_s = GIVE_BACK_SHARE * drain_s
    if await drained.empties_within(drain_s - give_back_s):
        return
    for turns_left in range(max(1, round(give_back_s / TURN_S)), 0, -1):
        running = sorted((local for local in drained.jobs.all() if local.running), key=_tokens_to_go, reverse=True)
        for local in running[: math.ceil(len(running) / turns_left)]:
            drained.give_back(local)
        if await drained.empties_within(TURN_S):
            return


def _tokens_to_go(local: LocalJob) -> int:
    """Return the most tokens that a job may still make."""
    stopping = local.job.stopping
    return sum(stopping.max_tokens - choice.start - len(choice.ids) for choice in local.running)
