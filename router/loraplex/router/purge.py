"""Removes a tenant's data from all cells of a router, and looks again until nothing of it is found.

operator ──PurgeTenant──▶ this router ─┬─▶ its own data
                                       ├─▶ the other live routers, at their relay ports
                                       ├─▶ Redis
                                       └─▶ the live workers, over their links
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc

from loraplex.cluster.v1 import cluster_pb2 as pb
from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.names import SHARED, check_tenant
from loraplex.contracts.broker.commands import is_of_tenant
from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.messages import WorkerState
from loraplex.relay.v1 import relay_pb2, relay_pb2_grpc
from loraplex.router.api.convert import forget_formats
from loraplex.router.catalog.adapters import AdapterConfigs, forget_warnings
from loraplex.router.catalog.models import ModelCell, Models
from loraplex.router.catalog.store_client import StoreClient
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.relay import WorkerForgets
from loraplex.router.generation.admission import GrammarProofs
from loraplex.router.generation.chat_format import tool_calls
from loraplex.router.generation.rollouts import Rollouts
from loraplex.router.quotas.quotas import Quotas
from loraplex.router.text.tokenizer import PromptTokenizer
from loraplex.runtime.rpc.errors import CallError, InvalidField, NotFound, PermissionDenied
from loraplex.runtime.rpc.server import channel_options
from loraplex.runtime.rpc.tls import LiveChannel, TlsFiles

log = logging.getLogger(__name__)


def purged_tenant(name: str) -> str:
    """Return a tenant's name. Raises InvalidField where it is none, or that of the shared adapters."""
    try:
        tenant = check_tenant(name)
    except ArtifactError as error:
        raise InvalidField("tenant", error.message) from error
    if tenant == SHARED:
        raise InvalidField("tenant", f"{SHARED!r} is not a tenant: delete the shared adapters one by one")
    return tenant


@dataclass(eq=False)
class RouterData:
    """The tenants' data of one router."""

    dispatcher: Dispatcher
    store: StoreClient
    configs: AdapterConfigs
    prompts: PromptTokenizer
    proofs: GrammarProofs
    quotas: Quotas
    rollouts: Rollouts

    async def forget(self, tenant: str) -> list[relay_pb2.Removal]:
        """End a tenant's calls and all with its adapters, and remove its data; return the counts by place."""
        ended, open_jobs = self._end_jobs(tenant)
        names = self.store.forget_tenant(tenant) + self.rollouts.forget_tenant(tenant)
        settings = self.configs.forget_tenant(tenant)
        forget_warnings()
        texts = forget_formats() + tool_calls().forget_tools() + self.proofs.forget() + self.prompts.forget()
        await self.quotas.forget_tenant()
        return [
            relay_pb2.Removal(place="jobs", removed=ended, left=open_jobs),
            relay_pb2.Removal(place="names of adapters", removed=names),
            relay_pb2.Removal(place="settings of adapters", removed=settings),
            relay_pb2.Removal(place="templates and formats", removed=texts, of_all_tenants=True),
        ]

    def _end_jobs(self, tenant: str) -> tuple[int, int]:
        """Fail jobs; returns how many, and how many are still there, until their calls have ended."""
        failed = open_jobs = 0
        for routed in self.dispatcher.jobs:
            error: CallError | None = None
            if routed.job.tenant == tenant:
                error = PermissionDenied(f"tenant {tenant} was purged", "TENANT_PURGED")
            elif routed.job.adapter is not None:
                parts = (part.revision for part in routed.job.adapter.summands)
                gone = next((revision for revision in parts if is_of_tenant(revision, tenant)), None)
                error = NotFound("adapter", gone) if gone is not None else None
            if error is None:
                continue
            open_jobs += 1
            if not routed.ended:
                routed.fail(error)
                failed += 1
                if routed.link is not None:  # else its worker would go on until its next frame is refused
                    routed.link.cancel(routed.job.job_id, routed.job.attempt)
        return failed, open_jobs


class TenantDataService(relay_pb2_grpc.TenantDataServiceServicer):
    """Serves loraplex.relay.v1.TenantDataService; `record` keeps an event of the audit log."""

    def __init__(self, data: RouterData, record: Callable[..., None]) -> None:
        self._data = data
        self._record = record

    async def ForgetTenant(
        self, request: relay_pb2.ForgetTenantRequest, context: object
    ) -> relay_pb2.ForgetTenantResponse:
        """End a tenant's calls at this router, and remove what it has of the tenant."""
        tenant = purged_tenant(request.tenant)
        removals = await self._data.forget(tenant)
        if removed := sum(one.removed for one in removals if not one.of_all_tenants):
            self._record("tenant forgotten", tenant=tenant, removed=removed)
        return relay_pb2.ForgetTenantResponse(removals=removals)


# Time in seconds after which no further pass begins, and interval between passes: calls that were ended take a moment.
PURGE_S = 15.0
PASS_S = 0.25
# Timeout in seconds for another router's answer.
ANSWER_S = 5.0

_Places = list[pb.PurgedPlace]


@dataclass(eq=False)
class CellPurge:
    """Purges tenants from the cells of this router, which is called at the relay address `own_address`."""

    models: Models
    own_data: RouterData
    workers: WorkerForgets
    own_address: str
    tls: TlsFiles | None
    pass_s: float = PASS_S

    async def run(self, tenant: str) -> _Places:
        """Remove everything, at least twice, until a pass finds nothing; return the places of all passes, by name."""
        until, total, passes = time.monotonic() + PURGE_S, dict[tuple[str, str], pb.PurgedPlace](), 0
        while True:
            # First at the routers, which else would put things back.
            places = [*await self._routers(tenant), *await self._stores(tenant), *await self._ask_workers(tenant)]
            passes += 1
            total = _added(total, places)
            clean = not any(place.left or place.error for place in total.values())
            if (clean and passes > 1) or time.monotonic() >= until:
                return [total[name] for name in sorted(total)]
            await asyncio.sleep(self.pass_s)

    async def _routers(self, tenant: str) -> _Places:
        own = _places(f"router {self.own_address}", await self.own_data.forget(tenant))
        try:
            cells = [cell for model in self.models.served for cell in self.models.reached(model)]
            addresses = [address for cell in cells for address in await cell.liveness.live_routers()]
        except REDIS_DOWN as error:
            return [*own, _failed("other routers", f"Redis does not say which live: {error}")]
        others = sorted(set(addresses) - {self.own_address})
        return [*own, *_flat(await asyncio.gather(*(self._ask_router(one, tenant) for one in others)))]

    async def _ask_router(self, address: str, tenant: str) -> _Places:
        part = f"router {address}"
        async with LiveChannel(address, self.tls, channel_options()) as channel:
            stub = channel.stub(relay_pb2_grpc.TenantDataServiceStub)
            try:
                request = relay_pb2.ForgetTenantRequest(tenant=tenant)
                answer = await stub.ForgetTenant(request, timeout=ANSWER_S)
            except grpc.aio.AioRpcError as error:
                return [_failed(part, f"{error.code().name}: {error.details()}")]
        return _places(part, answer.removals)

    async def _stores(self, tenant: str) -> _Places:
        cells = [(model.manifest.name, cell) for model in self.models.served for cell in model.cells.values()]
        return _flat(await asyncio.gather(*(self._cell_records(name, cell, tenant) for name, cell in cells)))

    async def _cell_records(self, model: str, cell: ModelCell, tenant: str) -> _Places:
        part = f"redis {model}/{cell.name}"
        try:
            found = await cell.queue.forget_tenant(tenant)
        except REDIS_DOWN as error:
            return [_failed(part, str(error) or type(error).__name__)]
        counts = {"waiting jobs": found.jobs, "pins": found.pins, "records by name": found.others}
        return [pb.PurgedPlace(part=part, place=place, removed=count) for place, count in counts.items()]

    async def _ask_workers(self, tenant: str) -> _Places:
        try:
            living = await self.models.living()
        except CallError as error:
            return [_failed("workers", error.message)]
        states = [state for _, _, state in living.workers]
        silent = [_failed(f"workers of cell {name}", "its Redis does not say which live") for name in living.silent]
        return silent + _flat(await asyncio.gather(*(self._ask_worker(state, tenant) for state in states)))

    async def _ask_worker(self, state: WorkerState, tenant: str) -> _Places:
        part, answer = f"worker {state.worker_id}", await self.workers.ask(state.incarnation, tenant)
        return [_failed(part, answer.error)] if answer.error else _places(part, answer.removals)


def _places(part: str, removals: Iterable[relay_pb2.Removal]) -> _Places:
    return [
        pb.PurgedPlace(
            part=part,
            place=one.place,
            removed=one.removed,
            left=one.left,
            of_all_tenants=one.of_all_tenants,
        )
        for one in removals
    ]


def _failed(part: str, error: str) -> pb.PurgedPlace:
    return pb.PurgedPlace(part=part, error=error)


def _flat(parts: Iterable[_Places]) -> _Places:
    return [place for places in parts for place in places]


def _added(total: dict[tuple[str, str], pb.PurgedPlace], passed: _Places) -> dict[tuple[str, str], pb.PurgedPlace]:
    """Merge a later pass into the totals: what it removed had been left, except where owners are unknown."""
    later = bool(total)
    now = {(place.part, place.place): place for place in passed}
    for name, place in now.items():
        if later and not place.of_all_tenants:
            place.left += place.removed
        place.removed += total[name].removed if name in total else 0
    answered = {place.part for place in passed}  # now; an error of the pass before is no more
    return {name: one for name, one in total.items() if not (one.error and one.part in answered)} | now
