"""Removes what a worker has of a tenant: on its disk, in its engine's memory, and adapters that operators have pinned.

An adapter's bytes are kept by their digest, which does not say whose they are. So the store says which digests no
tenant has any more, and those go. It does not know weighted sets: one that nobody uses now stays where all its parts
do, and where another tenant used it last.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping

import grpc
from loraplex.admin.v1 import tenants_pb2 as pb
from loraplex.admin.v1 import tenants_pb2_grpc

from broker.connection import REDIS_DOWN
from broker.messages import AdapterRef
from rpc.identity.tls import LiveChannel
from worker.engine_api import Removal
from worker.io.adapters.fetch import AdapterFetcher
from worker.io.adapters.operator_commands import OperatorCommands
from worker.io.engine_client.process import EngineProcess
from worker.io.jobs.results import Results
from worker.io.jobs.usage import UsageLog
from worker.io.relay.handler import ForgetError
from worker.ipc import ForgetTenant, TenantForgotten

log = logging.getLogger(__name__)

# Timeout in seconds for an answer of the store and of the engine.
ANSWER_S = 5.0
# Maximum number of digests in a call of the store.
_DIGESTS_AT_ONCE = 10_000


class TenantData:
    """The tenants' data of one engine session."""

    def __init__(
        self,
        fetcher: AdapterFetcher,
        engine: EngineProcess,
        results: Results,
        commands: OperatorCommands,
        usage: UsageLog,
    ) -> None:
        self._fetcher = fetcher
        self._engine = engine
        self._results = results
        self._commands = commands
        self._usage = usage
        # Answers that the engine owes, in the order of the questions.
        self._asked: deque[asyncio.Future[Mapping[str, Removal]]] = deque()

    async def forget(self, tenant: str) -> Mapping[str, Removal]:
        """Remove what is here of a tenant whose jobs its routers have ended; returns what was removed, by place.

        Raises ForgetError.
        """
        try:  # a later report would put the tenant's counter back into Redis
            await self._usage.report()
        except REDIS_DOWN as error:
            raise ForgetError("Redis does not answer") from error
        jobs = self._results.jobs.all()
        removals = {"jobs": Removal(left=sum(local.job.tenant == tenant for local in jobs))}
        removals["pinned adapters"] = Removal(self._commands.forget_tenant(tenant))
        gone = await gone_revisions(self._fetcher.channel, self._held())
        removals["adapters on disk"] = await self._fetcher.disk.forget(gone)
        # Adapters that came since the question are kept: the store has just sent them.
        kept = self._held() - gone | set(_kept_sets(self._used(), gone)) | self._fetcher.sets.kept(tenant, gone)
        return {**removals, **await self._ask_engine(ForgetTenant(tenant, frozenset(kept)))}

    def _used(self) -> list[AdapterRef]:
        """Return the adapters of jobs and of operators' commands."""
        jobs = (local.job for local in self._results.jobs.all())
        return [*(job.adapter for job in jobs if job.adapter is not None), *self._commands.adapters]

    def _held(self) -> set[str]:
        """Return the digests of the revisions that are here, or on their way, also in sets that nobody uses now."""
        parts = (part.digest for adapter in self._used() for part in adapter.summands)
        return {*self._fetcher.disk.digests, *self._results.stats.adapters, *parts, *self._fetcher.sets.parts}

    def answered(self, message: TenantForgotten) -> None:
        """Take an answer of the engine."""
        asked = self._asked.popleft()
        if not asked.done():
            asked.set_result(message.removals)

    async def _ask_engine(self, question: ForgetTenant) -> Mapping[str, Removal]:
        answer: asyncio.Future[Mapping[str, Removal]] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._engine.send(question)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise ForgetError(f"the engine has not answered for {ANSWER_S:g} s") from None


async def gone_revisions(channel: LiveChannel, digests: Collection[str]) -> set[str]:
    """Ask the store which revisions no tenant has any more. Raises ForgetError."""
    gone, left = set[str](), sorted(digests)
    try:
        while left:
            request = pb.ListGoneRevisionsRequest(digests=left[:_DIGESTS_AT_ONCE])
            stub = channel.stub(tenants_pb2_grpc.TenantServiceStub)
            gone.update((await stub.ListGoneRevisions(request, timeout=ANSWER_S)).digests)
            left = left[_DIGESTS_AT_ONCE:]
    except grpc.aio.AioRpcError as error:
        raise ForgetError(f"the adapter store does not say what is gone: {error.code().name}") from error
    return gone


async def drop_gone_revisions(fetcher: AdapterFetcher) -> None:
    """Remove revisions from the disk that no tenant has any more: they were purged while this worker was away."""
    if not fetcher.disk.digests:
        return
    try:
        gone = await gone_revisions(fetcher.channel, fetcher.disk.digests)
    except ForgetError as error:
        log.warning("the adapters on the disk are not compared with the store: %s", error)
        return
    if gone:
        await fetcher.disk.forget(gone)
        log.info("removed %d revisions from the disk that no tenant has any more", len(gone))


def _kept_sets(used: Iterable[AdapterRef], gone: Collection[str]) -> Iterable[str]:
    """Return the digests of the weighted sets in use of which no part is gone."""
    for adapter in used:
        if adapter.parts and not any(part.digest in gone for part in adapter.summands):
            yield adapter.digest
