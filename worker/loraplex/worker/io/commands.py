"""Operators' commands to this worker: to drain, which adapters to have on its device, and to remove a tenant's data.

    commands, pins of the cell ──▶ run ──▶ one task an adapter: fetch to the disk ──▶ engine: Warm | Pin
                                                   └ the disk keeps a pinned adapter until it is unpinned, a warm one
                                                     until the engine has it

A slow store delays no other command. Nothing outlives the engine session: the next one reads the cell's pins again.

An adapter's bytes are kept by their digest, which does not say whose they are. So where a tenant is removed, the store
says which digests no tenant has any more, and those go. It does not know weighted sets: one that nobody uses now stays
where all its parts do, and where another tenant used it last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import grpc

from loraplex.admin.v1 import tenants_pb2 as pb
from loraplex.admin.v1 import tenants_pb2_grpc
from loraplex.contracts.broker.commands import Command, Verb, concerns_tenant, is_unpinned_by
from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.messages import AdapterRef, AdapterRequest
from loraplex.contracts.broker.queue import JobQueue
from loraplex.runtime.rpc.tls import LiveChannel
from loraplex.worker.engine_api import Removal
from loraplex.worker.io.adapters.fetch import AdapterFetcher, DiskPin, FetchFailedError, fetch_source
from loraplex.worker.io.engine_client import EngineProcess
from loraplex.worker.io.relay.links import ForgetError
from loraplex.worker.io.results import Results, TokenReports
from loraplex.worker.ipc import ForgetTenant, Loaded, Pin, TenantForgotten, Unpin, Warm

log = logging.getLogger(__name__)


# Timeout in seconds of one wait for a command: so far below that of a call that a slow Redis can answer in time.
WAIT_S = 1.0
# Seconds until the next wait after Redis did not answer.
RETRY_S = 0.5
# Timeout in seconds for an adapter that is to be warm to get a slot that no sequence needs.
WARM_S = 60.0
# Seconds until a pinned adapter that the store did not deliver is fetched again.
FETCH_AGAIN_S = 2.0


@dataclass(slots=True, eq=False)
class _DevicePlacement:
    """An adapter on its way to the device; `pinned` ones stay there until they are unpinned.

    Tenants that have pinned the same bytes have a request each, which name the adapter differently.
    """

    requests: dict[str, AdapterRequest]
    pinned: bool
    disk_pin: DiskPin
    task: asyncio.Task[None] | None = None

    @property
    def request(self) -> AdapterRequest:
        """Return the request of the tenant that asked last."""
        return next(reversed(self.requests.values()))

    def take(self, request: AdapterRequest) -> None:
        """Note a tenant's request, in place of its former one."""
        self.requests.pop(request.tenant, None)
        self.requests[request.tenant] = request


class OperatorCommands:
    """The commands that one engine session carries out. `max_rank` is the largest rank that its engine takes."""

    def __init__(self, queue: JobQueue, engine: EngineProcess, fetcher: AdapterFetcher, max_rank: int) -> None:
        self._queue = queue
        self._engine = engine
        self._fetcher = fetcher
        self._max_rank = max_rank
        self._placements: dict[str, _DevicePlacement] = {}

    async def run(self, incarnation: str, stop: asyncio.Event) -> None:
        """Pin what the cell has pinned, then carry out commands; never returns. A drain sets `stop`, like SIGTERM."""
        pins_read = False
        while True:
            try:
                if not pins_read:
                    for request in await self._queue.pins.list():
                        self._begin(request, pinned=True)
                    pins_read = True
                command = await self._queue.commands.next(incarnation, WAIT_S)
            except REDIS_DOWN as error:
                log.warning("the commands' queue does not answer: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if command is not None:
                self._carry_out(command, stop)

    def _carry_out(self, command: Command, stop: asyncio.Event) -> None:
        match command:
            case Command(Verb.DRAIN):
                log.info("told to drain by an operator")
                stop.set()
            case Command(Verb.UNPIN, AdapterRequest(adapter)):
                self._unpin(adapter)
            case Command(verb, AdapterRequest() as request):
                self._begin(request, pinned=verb is Verb.PIN)

    @property
    def adapters(self) -> Iterable[AdapterRef]:
        """Return the adapters that are on the device for operators, or on their way there."""
        return [placement.request.adapter for placement in self._placements.values()]

    def forget_tenant(self, tenant: str) -> int:
        """Undo the commands for adapters of a tenant, and those given for it; returns how many there were.

        An adapter that another tenant has pinned too stays for that one.
        """
        removed = 0
        for placement in tuple(self._placements.values()):
            stays = {name: one for name, one in placement.requests.items() if not concerns_tenant(one, tenant)}
            removed += len(placement.requests) - len(stays)
            if stays:
                placement.requests = stays
            else:
                self._engine.send(Unpin(placement.request.adapter.digest))
                self._end(placement)
        return removed

    def loaded(self, message: Loaded) -> None:
        """Note that the engine has loaded an adapter, or failed to; one to be warm may leave the disk."""
        placement = self._placements.get(message.digest)
        if placement is None:
            return
        if message.error:
            what = "pinned" if placement.pinned else "warm"
            log.warning("%s is not %s: %s", placement.request.adapter.revision, what, message.error)
        if message.refused or not placement.pinned:
            self._end(placement)

    def _begin(self, request: AdapterRequest, *, pinned: bool) -> None:
        ref = request.adapter
        if ref.rank > self._max_rank:
            log.warning("%s: rank %d; this worker takes at most %d", ref.revision, ref.rank, self._max_rank)
            return
        before = self._placements.get(ref.digest)
        if before is not None and (before.pinned or not pinned):
            if pinned:
                before.take(request)
            return  # the device has it as requested, or will
        if before is not None:
            self._end(before)
        placement = self._placements[ref.digest] = _DevicePlacement(
            {request.tenant: request}, pinned, self._fetcher.disk_pin()
        )
        placement.task = asyncio.get_running_loop().create_task(self._place(placement))

    def _unpin(self, ref: AdapterRef) -> None:
        pinned = [placement for placement in self._placements.values() if placement.pinned]
        for placement in pinned:
            if is_unpinned_by(placement.request.adapter, ref):
                log.info("unpins %s", placement.request.adapter.revision)
                self._engine.send(Unpin(placement.request.adapter.digest))
                self._end(placement)

    async def _place(self, placement: _DevicePlacement) -> None:
        while True:
            ref = placement.request.adapter
            try:
                source = await fetch_source(placement.disk_pin, ref, placement.request.tenant)
                break
            except FetchFailedError as error:
                if not placement.pinned or error.failure.code != "UNAVAILABLE":
                    log.warning("can't %s %s: %s", "pin" if placement.pinned else "warm", ref.revision, error)
                    self._end(placement)
                    return
                log.warning("can't pin %s yet: %s", ref.revision, error)
                await asyncio.sleep(FETCH_AGAIN_S)
                await self._renew_grant(placement)
        if placement.pinned:
            log.info("pins %s", ref.revision)
            self._engine.send(Pin(source))
            return
        self._engine.send(Warm(source))
        await asyncio.sleep(WARM_S)  # `loaded` ends this
        log.warning("%s is not warm after %g s: no slot", ref.revision, WARM_S)
        self._engine.send(Unpin(ref.digest))  # the engine must not read files that the disk may remove
        self._end(placement)

    async def _renew_grant(self, placement: _DevicePlacement) -> None:
        """Take the grant that routers have given to a pin of the cell since."""
        if placement.request.adapter.grant:
            with contextlib.suppress(*REDIS_DOWN):
                for request in await self._queue.pins.list():
                    if placement.requests.get(request.tenant) == request:  # but for the grant
                        placement.requests[request.tenant] = request

    def _end(self, placement: _DevicePlacement) -> None:
        """Forget a placement; the disk need not keep its adapter any more."""
        del self._placements[placement.request.adapter.digest]
        placement.disk_pin.release()
        if placement.task is not None and placement.task is not asyncio.current_task():
            placement.task.cancel()

    async def close(self) -> None:
        """End all placements; the engine is gone or will be."""
        ending = [placement.task for placement in self._placements.values() if placement.task is not None]
        for placement in list(self._placements.values()):
            self._end(placement)
        await asyncio.gather(*ending, return_exceptions=True)


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
        usage: TokenReports,
    ) -> None:
        self._fetcher = fetcher
        self._engine = engine
        self._results = results
        self._commands = commands
        self._usage = usage
        # Answers that the engine owes, in the order of the questions.
        self._asked: deque[asyncio.Future[Mapping[str, Removal]]] = deque()

    async def forget(self, tenant: str) -> Mapping[str, Removal]:
        """Remove a tenant's data, after routers have ended its jobs; return the counts by place.

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
        staying = self._held() - gone | set(_kept_sets(self._used(), gone)) | self._fetcher.sets.staying(tenant, gone)
        return {**removals, **await self._ask_engine(ForgetTenant(tenant, frozenset(staying)))}

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
    gone, remaining = set[str](), sorted(digests)
    try:
        while remaining:
            request = pb.ListGoneRevisionsRequest(digests=remaining[:_DIGESTS_AT_ONCE])
            stub = channel.stub(tenants_pb2_grpc.TenantServiceStub)
            gone.update((await stub.ListGoneRevisions(request, timeout=ANSWER_S)).digests)
            remaining = remaining[_DIGESTS_AT_ONCE:]
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
    """Return the digests of weighted sets in use whose parts all exist."""
    for adapter in used:
        if adapter.parts and not any(part.digest in gone for part in adapter.summands):
            yield adapter.digest
