"""The jobs that this worker holds, each with the ids it has made: kept until the router acks, so that it can rewind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from broker.messages import Job
from worker.scheduling.contract import Failure, FinishKind, Output


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ends here. Neither kind nor failure: it is given back, to go on elsewhere."""

    kind: FinishKind | None = None
    failure: Failure | None = None


@dataclass(slots=True)
class HeldJob:
    """A claimed job. `ids` were made here, after the `start` ids of earlier attempts."""

    job: Job
    sequence_id: str
    ids: list[int] = field(default_factory=list)
    ending: Ending | None = None
    adapter_ms: float = 0.0
    cached_tokens: int = 0
    # How many of `ids` have been handed to the link.
    sent: int = 0
    # What gets it into the engine; None once it is there.
    entering: asyncio.Task[None] | None = None

    @property
    def start(self) -> int:
        """How many ids earlier attempts had made."""
        return len(self.job.emitted.get(0, ()))

    def record(self, output: Output) -> None:
        """Keep what a step made of it."""
        if not self.ids:
            self.adapter_ms += output.adapter_ms or 0.0
            self.cached_tokens = output.cached_tokens or 0
        self.ids.extend(output.token_ids)
        if output.finish is not None:
            kind = None if output.finish is FinishKind.FAILED else output.finish
            self.ending = Ending(kind, output.failure)

    def rewind(self, offset: int) -> None:
        """Send again from this offset, a count over all attempts."""
        self.sent = max(0, min(offset - self.start, len(self.ids)))

    @property
    def runs(self) -> bool:
        """Whether it still takes a row."""
        return self.ending is None


class HeldJobs:
    """All of them, by job and attempt; another attempt of a job is another entry."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, int], HeldJob] = {}

    def __len__(self) -> int:
        """How many, ended ones that wait for their ack included."""
        return len(self._jobs)

    @property
    def running(self) -> list[HeldJob]:
        """Those that take a row."""
        return [held for held in self._jobs.values() if held.runs]

    def add(self, job: Job) -> HeldJob:
        """Hold a claimed job."""
        held = HeldJob(job, sequence_id=f"{job.attempt}/{job.job_id}")
        self._jobs[job.job_id, job.attempt] = held
        return held

    def get(self, job_id: str, attempt: int) -> HeldJob | None:
        """A held job."""
        return self._jobs.get((job_id, attempt))

    def of_sequence(self, sequence_id: str) -> HeldJob | None:
        """The held job of an engine's sequence."""
        attempt, _, job_id = sequence_id.partition("/")
        return self._jobs.get((job_id, int(attempt)))

    def pop(self, job_id: str, attempt: int) -> HeldJob | None:
        """Hold it no longer."""
        return self._jobs.pop((job_id, attempt), None)

    def of_router(self, address: str) -> list[HeldJob]:
        """What is held for one router."""
        return [held for held in self._jobs.values() if held.job.reply_to == address]
