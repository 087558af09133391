"""States of a job inside its router, and the transitions between them.

                   ┌─────────────── attempt + 1 ──────────────┐
                   ▼                                          │
    admitted ──▶ ENQUEUEING ──▶ QUEUED ◀──▶ MISSING ──▶ ... BOUND ──▶ ENDED ──▶ RELEASED

A worker can claim the job from ENQUEUEING (it is quicker than the queue's answer), QUEUED and MISSING. A MISSING job is
dispatched again as well. Every job can end, or be released before it ends.
"""

from __future__ import annotations

from enum import Enum


class JobState(Enum):
    """A state of a job."""

    # The current attempt is on its way into the queue.
    ENQUEUEING = "enqueueing"
    # The queue has the attempt, or a worker that has claimed it and has not told the router yet.
    QUEUED = "queued"
    # The last look found the attempt neither in the queue nor at a worker.
    MISSING = "missing"
    # A worker incarnation has the attempt.
    BOUND = "bound"
    # No worker needs to go on: every choice has ended, or the job has failed.
    ENDED = "ended"
    # The router has forgotten the job.
    RELEASED = "released"


_ENDS = frozenset({JobState.ENDED, JobState.RELEASED})
_ALLOWED: dict[JobState, frozenset[JobState]] = {
    JobState.ENQUEUEING: _ENDS | {JobState.QUEUED, JobState.BOUND},
    JobState.QUEUED: _ENDS | {JobState.MISSING, JobState.BOUND},
    JobState.MISSING: _ENDS | {JobState.QUEUED, JobState.BOUND, JobState.ENQUEUEING},
    JobState.BOUND: _ENDS | {JobState.ENQUEUEING},
    JobState.ENDED: frozenset({JobState.RELEASED}),
    JobState.RELEASED: frozenset(),
}


class JobTransitionError(Exception):
    """A transition that is not allowed: a fault of the router's own code."""


def check_transition(job_id: str, before: JobState, after: JobState) -> None:
    """Raise JobTransitionError where a job can't go from one state to the other."""
    if after not in _ALLOWED[before]:
        raise JobTransitionError(f"job {job_id} can't go from {before.value} to {after.value}")
