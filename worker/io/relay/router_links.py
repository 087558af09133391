"""The links of one engine session to the routers: to every live router, and to every router that has a job here.

    Presence (Redis's live routers) ──follow──▶ RouterLinks ──live──▶ Intake (claims for these routers alone)
    Intake (routers of jobs that it could not claim) ──dial──▶

Two ends may each reach Redis and not each other. So a worker claims only for routers that it has a live link to; jobs
of the others are left to workers that reach their router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from loraplex.relay.v1 import relay_pb2 as pb

from worker.engine_api import Removal
from worker.io.local_jobs.choice import LocalChoice
from worker.io.local_jobs.jobs import LocalJob, LocalJobs
from worker.io.metrics import WorkerMetrics
from worker.io.relay.handler import ForgetError, RelayHandler
from worker.io.relay.link_settings import LinkSettings
from worker.io.relay.links import RouterLink


async def _not_yet(tenant: str) -> Mapping[str, Removal]:
    raise ForgetError("the worker does not serve yet")


class RouterLinks:
    """The links of one engine session, by router address."""

    def __init__(
        self, settings: LinkSettings, jobs: LocalJobs, handler: RelayHandler, metrics: WorkerMetrics | None = None
    ) -> None:
        self._settings = settings
        self._jobs = jobs
        self._handler = handler
        self._metrics = metrics or WorkerMetrics()
        self._links: dict[str, RouterLink] = {}
        # Routers that live, as Redis said last.
        self._routers: frozenset[str] = frozenset()
        self._closing = False
        self._forgetting: set[asyncio.Task[None]] = set()
        # Removes a tenant's data from this worker.
        self.forget_tenant: Callable[[str], Awaitable[Mapping[str, Removal]]] = _not_yet
        # Set when a link has come up or is lost, and then replaced.
        self.next_change = asyncio.Event()

    @property
    def live(self) -> tuple[str, ...]:
        """Return the addresses of the routers that answer over their link."""
        return tuple(address for address, link in self._links.items() if link.state.is_live)

    @property
    def lost(self) -> frozenset[str]:
        """Return the routers that have not answered for a while: rows of their jobs may go to other jobs."""
        return frozenset(address for address, link in self._links.items() if link.state.lost_s > self._settings.spare_s)

    def follow(self, addresses: Collection[str]) -> None:
        """Keep a link to each of these live routers. A link to another one lasts while it is open or has jobs."""
        self._routers = frozenset(addresses)
        for address in addresses:
            self._keep(address)
        self._count()

    def dial(self, addresses: Iterable[str]) -> None:
        """Try at once to reach these routers: jobs of them wait."""
        for address in addresses:
            link = self._keep(address)
            if link is not None:
                link.state.hurry()

    def claimed(self, local: LocalJob) -> None:
        """Tell the job's router which worker has it."""
        self._link(local.job.reply_to).claimed(local)

    def progressed(self, choice: LocalChoice) -> None:
        """Send what an answer has got: ids, or its end."""
        self._link(choice.job.reply_to).progressed(choice)

    def forget(self, request: pb.Forget, link: RouterLink) -> None:
        """Remove a tenant's data in the background, and give the answer to the link."""
        task = asyncio.create_task(self._forget(request, link))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _forget(self, request: pb.Forget, link: RouterLink) -> None:
        answer = pb.Forgotten(number=request.number)
        try:
            for place, found in (await self.forget_tenant(request.tenant)).items():
                answer.removals.add(
                    place=place, removed=found.removed, left=found.left, of_all_tenants=found.of_all_tenants
                )
        except ForgetError as error:
            answer.error = str(error)
        link.forgotten(answer)

    def is_wanted(self, address: str) -> bool:
        """Return whether a link is to be opened again when it breaks, though no job of its router is here."""
        return address in self._routers and not self._closing

    def changed(self) -> None:
        """Note that a link has come up, or is lost."""
        self._count()
        self.next_change.set()
        self.next_change = asyncio.Event()

    def ended(self, address: str, link: RouterLink) -> None:
        """Forget a link: what comes now opens another."""
        if self._links.get(address) is link:
            del self._links[address]

    async def keep_alive(self) -> None:
        """Tell the routers of local jobs twice a second that this worker lives, where nothing else does; never returns.

        A router that does not find this worker in Redis any more so knows that its jobs go on.
        """
        while True:
            await asyncio.sleep(self._settings.beat_s)
            for address in dict.fromkeys(local.job.reply_to for local in self._jobs.all()):
                link = self._links.get(address)
                if link is not None:
                    link.beat()

    async def close(self, flush_s: float) -> None:
        """End every link; what is still to be sent has `flush_s`."""
        self._closing = True
        for task in self._forgetting:
            task.cancel()
        await asyncio.gather(*[link.close(flush_s) for link in self._links.values()])

    def _keep(self, address: str) -> RouterLink | None:
        return None if self._closing else self._link(address)

    def _link(self, address: str) -> RouterLink:
        link = self._links.get(address)
        if link is None:
            link = RouterLink(address, self._settings, self._jobs, self._handler, self._metrics, self)
            self._links[address] = link
        return link

    def _count(self) -> None:
        live = len(self.live)
        self._metrics.router_links.labels("live").set(live)
        self._metrics.router_links.labels("lost").set(len(self._routers.difference(self.live)))
