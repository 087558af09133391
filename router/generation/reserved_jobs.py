"""Puts the jobs of requests into the queue once their tokens are reserved."""

from __future__ import annotations

from contextlib import suppress

from broker.ledger import ReserveCall, SendReserve
from broker.messages import Job
from broker.queue import UnreservedError
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.routed_job import RoutedJob
from router.generation.resume import Resumption
from router.quotas.quotas import Quotas
from router.quotas.session import Grant
from router.quotas.usage import Facts

# Maximum prompt tokens of a job that is sent together with its reservation: where that is refused, Redis has read the
# job for nothing.
JOINED_TOKENS = 4096


class ReservedJobs:
    """Reserves the tokens of jobs and dispatches these, at one router.

    Redis gets a new request's reservation and its job in one round trip: the script that enqueues looks for the first.
    """

    def __init__(self, quotas: Quotas, dispatcher: Dispatcher) -> None:
        self._quotas = quotas
        self._dispatcher = dispatcher

    async def dispatch(self, job: Job, resumption: Resumption | None) -> tuple[Grant | None, RoutedJob]:
        """Put a job into the queue. Raises Exhausted or Unavailable; then its reservation ends."""
        routed: RoutedJob | None = None

        async def send(call: ReserveCall) -> None:
            nonlocal routed
            with suppress(UnreservedError):  # the ledger's answer says why
                routed = await self._dispatcher.dispatch(job, entry, call)

        with self._dispatcher.early_entry(job) as entry:
            joined = resumption is None and len(job.prompt_ids) <= JOINED_TOKENS
            grant = await self.reserve(job, resumption, send if joined else None)
            try:
                return grant, routed or await self._dispatcher.dispatch(job, entry)
            except BaseException:
                if grant is not None:
                    grant.leave() if job.resumed else grant.settle()
                raise

    async def reserve(
        self, job: Job, resumption: Resumption | None, send: SendReserve | None = None, *, complete: bool = False
    ) -> Grant | None:
        """Reserve the tokens of a request, or take over the reservation of one that is resumed.

        None where there are no limits. `send`: see Ledger.reserve. `complete`: the client has the whole answer, so that
        nothing more is reserved. Raises Exhausted or Unavailable.
        """
        resumed = (resumption.claims.reservation, resumption.received_tokens) if resumption else None
        given, made = (0, 0) if complete else (len(job.prompt_ids), job.n * job.stopping.max_tokens)
        facts = Facts(cached_tokens=resumption.claims.began.cached_tokens if resumption else 0).of_job(job)
        return await self._quotas.reserve(job.tenant, given, made, facts=facts, resumed=resumed, send=send)
