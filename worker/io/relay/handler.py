"""The interface between a link and the jobs that its router's messages are about."""

from __future__ import annotations

from typing import Protocol


class RelayHandler(Protocol):
    """Carries out what routers ask for: worker.io.jobs.results.Results."""

    def acked(self, job_id: str, attempt: int) -> None:
        """Remove a job whose router has all of it."""

    def cancel(self, job_id: str, attempt: int) -> None:
        """Stop and remove a job."""

    def cancel_choice(self, job_id: str, attempt: int, choice: int) -> None:
        """Stop and remove one answer of a job."""

    def router_gone(self, address: str) -> None:
        """Remove the jobs of a router that is out of reach."""
