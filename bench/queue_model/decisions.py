"""Answers of the queue's model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal of a job: the field of QueueLimits that is reached, `late` with the wait before its turn, or
    `quarantined` with the time that is left.
    """

    why: str
    wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class ClaimDecision:
    """A claim's answer: see `broker.terms.Claimed`."""

    job_ids: tuple[str, ...]
    waiting: int
    adapter_requests: tuple[bytes, ...]
    hold_ms: int
    unlinked: tuple[str, ...]
    crowded: bool = False
    # Number of jobs looked at; of a claim that took none also the number of the last arrival that needs no second look.
    looks: int = 0
    seen: int = 0
    # The last of the jobs, where it must begin apart from other tenants' jobs.
    apart: str | None = None
