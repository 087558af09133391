"""What a link hands on of its router's messages."""

from __future__ import annotations

from typing import Protocol


class RelayHandler(Protocol):
    """What routers ask for, by job: worker.io.jobs.results.Results."""

    def acked(self, job_id: str, attempt: int) -> None:
        """Remove a job whose router has all of it."""

    def cancel(self, job_id: str, attempt: int) -> None:
        """Stop and remove a job."""

    def cancel_choice(self, job_id: str, attempt: int, choice: int) -> None:
        """Stop and remove one answer of a job."""

    def router_gone(self, address: str) -> None:
        """Remove the jobs of a router that is out of reach."""
