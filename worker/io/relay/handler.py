"""The interfaces between a link, the jobs that its router's messages are about, and the keeper of all links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from loraplex.relay.v1 import relay_pb2 as pb

if TYPE_CHECKING:
    from worker.io.relay.links import RouterLink


class ForgetError(Exception):
    """The worker does not know what to remove of a tenant, or its engine does not answer; the message is one line."""


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


class LinkOwner(Protocol):
    """Keeps the links: worker.io.relay.router_links.RouterLinks."""

    def is_wanted(self, address: str) -> bool:
        """Return whether a link is to be opened again when it breaks, though no job of its router is here."""

    def changed(self) -> None:
        """Note that a link has come up, or is lost."""

    def ended(self, address: str, link: RouterLink) -> None:
        """Forget a link: what comes now opens another."""

    def forget(self, request: pb.Forget, link: RouterLink) -> None:
        """Remove a tenant's data in the background, and give the answer to the link."""
