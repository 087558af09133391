"""The servers of a router, and its wiring, start and ordered stop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraplex.inference.v1 import inference_pb2_grpc
from redis.asyncio import Redis

from loraplex.cluster.v1 import cluster_pb2_grpc
from loraplex.contracts.artifacts.names import parse_revision_name
from loraplex.contracts.broker.cells import DrainedCells
from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.ledger import Ledger
from loraplex.contracts.broker.messages import WorkerPhase, WorkerState
from loraplex.contracts.broker.startup import POLICY_LOOK_S, EvictionWatch
from loraplex.relay.v1 import relay_pb2_grpc
from loraplex.router.api.cells import CellCommands
from loraplex.router.api.cluster import AdapterCommands, ClusterService
from loraplex.router.api.request_telemetry import COUNTED_METHODS, RequestTelemetry
from loraplex.router.api.service import InferenceService, OpenCalls
from loraplex.router.catalog.adapters import AdapterConfigs
from loraplex.router.catalog.cells import LOOK_S, CellServers, connect_cells
from loraplex.router.catalog.models import Models
from loraplex.router.catalog.store_client import KEYS_LOOK_S, KeyCopy, StoreClient
from loraplex.router.dispatch.cells import Cells
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import RelayReach
from loraplex.router.dispatch.outbox import Placer
from loraplex.router.dispatch.relay import RelayService, check_advertised
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.generation.admission import Admission, GrammarProofs
from loraplex.router.generation.generation import STALLED_LOOK_S, ContentHook, Generation
from loraplex.router.generation.resume import LOOK_S as KEYS_S
from loraplex.router.generation.resume import ResumeEpochs, ResumeKeys, ResumeTokens
from loraplex.router.generation.rollouts import REPORT_S
from loraplex.router.metrics import RouterMetrics
from loraplex.router.purge import CellPurge, RouterData, TenantDataService
from loraplex.router.quotas.plans import Plans
from loraplex.router.quotas.quotas import Quotas
from loraplex.router.settings import CONTENT_HOOKS, ENGINE_PROTOCOLS, USAGE_EVENTS, RouterSettings
from loraplex.router.text.tokenizer import PromptTokenizer
from loraplex.runtime.rpc.errors import CallError, PermissionDenied
from loraplex.runtime.rpc.interceptors import CallMeter, Interceptor
from loraplex.runtime.rpc.principal import Principal, Role, calling_key
from loraplex.runtime.rpc.server import Server, channel_options, relay_options, stop_signal
from loraplex.runtime.rpc.tasks import every, unless_stopped
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.telemetry.logging import LogOnce
from loraplex.runtime.telemetry.metrics import serve_metrics
from loraplex.runtime.telemetry.tracing import Spans, set_up_tracing
from loraplex.runtime.tenancy.access import GuardedServers
from loraplex.runtime.tenancy.api_keys import KeyDirectory
from loraplex.runtime.tenancy.audit_log import AuditLog
from loraplex.runtime.tenancy.auditor import WINDOW_S, Auditor
from loraplex.runtime.tenancy.certificates import end_of
from loraplex.runtime.tenancy.guard import Guard, Refused, open_guard
from loraplex.runtime.tenancy.permissions import Port

if TYPE_CHECKING:
    from loraplex.contracts.broker.seals import Seals
    from loraplex.router.dispatch.relay import RelayCredentials

log = logging.getLogger(__name__)


def _engine_protocols(settings: RouterSettings) -> list[Any]:
    """Return the services of the protocols, whose package need not be installed where they are not served."""
    names = sorted({*filter(None, settings.engine_protocol.split(","))})
    return [getattr(import_module(f"loraplex.engine_protocols.{name}"), ENGINE_PROTOCOLS[name]) for name in names]


class RelayAccess:
    """The relay's server, and the `credentials` of its links; None where TLS is off."""

    def __init__(self, tls: TlsFiles | None, refused: Refused) -> None:
        self._tls = tls
        self.credentials: RelayCredentials | None = None
        if tls is None:
            self.server = Server(open_guard(Port.RELAY, refused=refused), options=relay_options())
            return
        from loraplex.router.dispatch.relay import RelayCredentials
        from loraplex.runtime.tenancy.certificates import CertificateReader

        self.credentials = RelayCredentials(tls, refused)
        self.server = Server(Guard([Port.RELAY], [CertificateReader()], refused), options=relay_options())

    def service(self, dispatcher: Dispatcher, metrics: RouterMetrics) -> RelayService:
        """Return the service of these links, which the server serves from now on."""
        self._service = RelayService(dispatcher, metrics, self.credentials)
        self._service.add_to(self.server)
        return self._service

    def serve_tenant_data(self, data: RouterData, record: Callable[..., None]) -> None:
        """Let other routers remove this router's data of tenants; `record` keeps an event of the audit log."""
        relay_pb2_grpc.add_TenantDataServiceServicer_to_server(TenantDataService(data, record), self.server.services)

    def bind(self, host: str, port: int) -> int:
        """Listen; return the port. Raises PortInUse."""
        credentials = None if self._tls is None else self._tls.server_credentials(client_certificates=True)
        return self.server.bind(host, port, credentials)

    async def stop(self, grace_s: float) -> None:
        """End the workers' streams, after the messages that are still to be sent; cancel those that last longer."""
        stopping = asyncio.create_task(self.server.stop(grace_s))
        self._service.close()
        await stopping


# Interval in seconds between looks for pins whose grants end soon.
PINS_S = 60.0


def seals_of(tls: TlsFiles | None, job_key: str) -> Seals | None:
    """Return the seals of a router; None without credentials. Raises ValueError where the files cannot be used."""
    if tls is None:
        return None
    from loraplex.contracts.broker.job_keys import JobKeys
    from loraplex.contracts.broker.seals import Seals
    from loraplex.runtime.tenancy.signatures import Signer, Verifier

    return Seals(JobKeys(Path(job_key)), Verifier(tls, Role.ROUTER), Signer(tls, Role.ROUTER))


def resume_keys_of(settings: RouterSettings, redis: Redis, seals: Seals | None) -> ResumeKeys:
    """Return the keys of resume tokens: from the settings, derived, or without credentials from Redis."""
    if settings.resume_key:
        return ResumeKeys(settings.resume_key, settings.former_keys)
    if seals is not None:
        return ResumeKeys(accepted=settings.former_keys, derived=lambda: seals.keys.derived(b"resume tokens"))
    return ResumeKeys(accepted=settings.former_keys, redis=redis)


async def renew_pins(models: Models) -> None:
    """Give pinned adapters new grants before theirs end."""
    for model in models.served:
        try:
            for cell in models.reached(model):
                await cell.queue.pins.renew_grants()
        except REDIS_DOWN as error:
            log.warning("the grants of pinned adapters are not renewed: %s", error)


# Time in seconds that calls get to send their last status when the router stops.
HAND_OVER_S = 1.0
# Time in seconds in which a router that stops still takes calls: gRPC cancels those that wait to be accepted, and their
# clients cannot know that nothing was computed.
ACCEPT_S = 0.25


async def run(settings: RouterSettings, *, supervised: bool = False) -> None:
    """Serve until SIGTERM or SIGINT.

    A supervised router drains to its end, however many signals come: the supervisor sends one, and its group may get
    another. Raises AuditFileError, PortInUse, RedisUnreachableError or AdvertisedAddressError before it serves.
    """
    stop, metrics, spans = (
        stop_signal(second_ends=not supervised),
        RouterMetrics(),
        set_up_tracing("router", os.environ),
    )
    metrics_server = serve_metrics(metrics, settings.host_of_operators(settings.host), settings.metrics_port)
    servers = await unless_stopped(stop, connect_cells(settings.redis_url, settings.cell_addresses))
    if servers is None:
        return
    router = Router(settings, metrics, spans, servers, shared_ports=supervised)
    try:
        await router.start(stop)
        await router.follow_until(stop)
    finally:
        await router.stop()
        if metrics_server is not None:
            metrics_server.close()
        await asyncio.to_thread(spans.close)


class Router:
    """A router's parts, their start and their ordered stop.

    `shared_ports`: other processes may listen on the ports of tenants as well.
    """

    def __init__(
        self,
        settings: RouterSettings,
        metrics: RouterMetrics,
        spans: Spans,
        servers: CellServers,
        *,
        shared_ports: bool,
    ) -> None:
        self.settings, self.metrics, self.servers, self.shared_ports = settings, metrics, servers, shared_ports
        self.tls = settings.tls_files()
        self.seals = seals_of(self.tls, settings.job_key)
        self.store = StoreClient(settings.store, self.tls, settings.store_away_s)
        self.plans = Plans(self.store)
        self.models = Models(self.store, servers.cells, settings.queue_limits, seals=self.seals)
        self.models.default_model, self.models.refusal = self.plans.default_model, self.plans.refusal
        self.models.scales_from_zero = settings.scale_from_zero
        self.models.use_generation_config = settings.generation_config == "auto"
        self.models.unset_max_tokens = settings.default_max_tokens
        self.reach = RelayReach(metrics)
        self.cells = Cells(servers.names, self.reach.linked, DrainedCells(servers.home))
        self.dispatcher = _dispatcher(settings, self.models, self.reach, self.plans, metrics, self.cells)
        self.telemetry = RequestTelemetry(metrics, spans, self.models)
        self.auditor = Auditor(AuditLog(settings.audit, "router", metrics.audit))
        self.prompts, self.proofs, self.configs = PromptTokenizer(), GrammarProofs(), AdapterConfigs(self.store)
        targets, usage = (settings.usage_file, settings.usage_url), None
        if any(targets):
            usage = import_module(USAGE_EVENTS).UsageLog.open(servers.home, metrics, *targets)
        self.quotas = Quotas(Ledger(servers.home), self.plans, metrics, usage, self.store)
        self.hook: ContentHook | None = None
        if url := settings.content_hook:
            self.hook = import_module(CONTENT_HOOKS).open_hook(url, self.tls, self.models, metrics, self.auditor)
        self.commands = AdapterCommands(self.models, self.store)
        self.resume_keys = resume_keys_of(settings, servers.home, self.seals)
        self.public = self._make_public_servers()
        self.relay = RelayAccess(self.tls, self._refused)
        self.relay_service = self.relay.service(self.dispatcher, metrics)
        # Once the relay has an address, and once it serves.
        self.generation: Generation | None = None
        self._following: asyncio.Task[None] | None = None

    def _make_public_servers(self) -> GuardedServers:
        """Return the servers for tenants and operators, which report refused callers."""
        keys = KeyDirectory(stale_s=self.settings.store_away_s)
        self.metrics.keys_age.set_function(keys.age_s)
        if (tls := self.tls) is not None:
            self.metrics.certificate_end.set_function(lambda: end_of(tls.content.cert, tls.content.ca))
        if self.seals is not None:  # what is not opened is reported as callers are
            self.seals.on_refused = lambda kind, error: self._refused(
                f"redis/{kind}", None, PermissionDenied(str(error), error.reason), "redis:"
            )
        follow_keys = partial(every, KEYS_LOOK_S, KeyCopy(self.store, keys).look)
        return GuardedServers(self.settings, tls, self._make_server, keys, self._refused, follow_keys)

    def _refused(self, method: str, caller: Principal | None, error: CallError, peer: str) -> None:
        self.telemetry.refused_caller(method, caller, error)
        self.auditor.refused(method, caller, error, peer)

    def _make_server(self, guard: Guard, port: Port) -> Server:
        settings, meter = self.settings, CallMeter(*self.metrics.calls, COUNTED_METHODS)
        if port is Port.OPERATORS:
            return Server(guard, outer=[meter], interceptors=[self.auditor])
        open_calls = OpenCalls(settings.open_calls_limit, settings.open_bytes_limit, self.telemetry.refused)
        inner: list[Interceptor] = [open_calls, self.auditor]
        inner[:0] = [protocol.callers(settings.engine_tenant) for protocol in _engine_protocols(settings)[:1]]
        # More calls of one connection than the limit of open calls, so that this limit refuses them.
        options = [*channel_options(), ("grpc.max_concurrent_streams", 2 * settings.open_calls_limit)]
        return Server(guard, outer=[meter], interceptors=inner, options=options, shared_ports=self.shared_ports)

    async def start(self, stop: asyncio.Event) -> None:
        """Listen and serve, once what requests need is read. Raises PortInUse or AdvertisedAddressError."""
        settings = self.settings
        relay_port = self.relay.bind(settings.relay_host, settings.relay_port)
        self.reach.address = f"{settings.relay_name}:{relay_port}"
        self.models.announce(self.reach.address)
        await asyncio.gather(self.resume_keys.look(), self.plans.look())
        self.generation = self._add_services()
        addresses = self.public.bind(settings.host, settings.port)
        await self.relay.server.start()
        await self.public.start()
        checking = check_advertised(settings.relay_name, relay_port, self.relay_service.router_id, self.tls)
        await unless_stopped(stop, checking)
        self.metrics.health.listens()
        print(f"ready router={' '.join(addresses)}{self.metrics.ready_word}", flush=True)

    def _add_services(self) -> Generation:
        """Serve what the permissions table lets somebody call; return what runs the requests."""
        settings, models, dispatcher = self.settings, self.models, self.dispatcher
        admission = Admission(
            models, self.store, self.configs, self.reach.address, self.reach, self.prompts, self.proofs
        )
        tokens = ResumeTokens(self.resume_keys, ResumeEpochs(self.store, self.public.keys))
        generation = Generation(
            *(admission, dispatcher, tokens, self.quotas, self.prompts),
            client_stall_s=settings.client_stall_s,
            hook=self.hook,
        )
        data = RouterData(
            dispatcher, self.store, self.configs, self.prompts, self.proofs, self.quotas, generation.rollouts
        )
        self.relay.serve_tenant_data(data, self.auditor.record)
        purge = CellPurge(models, data, self.relay_service.forgets, self.reach.address, self.tls)
        inference = InferenceService(generation, admission, self.telemetry)
        cells = CellCommands(models, self.cells)
        cluster = ClusterService(models, dispatcher, self.metrics, self.commands, purge, self.resume_keys, cells)
        self.public.add(lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server))
        self.public.add(lambda server: cluster_pb2_grpc.add_ClusterServiceServicer_to_server(cluster, server))
        for protocol in _engine_protocols(settings):
            relay, adapter = self.relay_service, settings.engine_adapter
            parts = inference, dispatcher, self.commands, relay, adapter, self._waits_for
            self.public.add(protocol(*parts).register)
        return generation

    def _waits_for(self) -> str:
        """Return what is missing before requests can be served, or nothing."""
        return self.models.waits_for() or self.reach.waits_for()

    async def follow_until(self, stop: asyncio.Event) -> None:
        """Return when the router is told to stop, while all is followed on. Raises what ends one of the works."""
        self._following = following = asyncio.create_task(self._follow())
        await asyncio.wait({following, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()

    async def _follow(self) -> None:
        """Follow the store, the workers, the keys and the router's own jobs; never returns."""
        assert self.generation is not None, "it has started"
        evicted = self.metrics.evicted_keys.inc
        async with asyncio.TaskGroup() as tasks:  # one that fails ends the router: all of them are needed
            for work in (
                self.dispatcher.redispatch_missing(),
                self.public.follow(),
                self.quotas.follow(),
                self._follow_workers(),
                every(LOOK_S, self.models.look_at_store),
                every(KEYS_S, self.resume_keys.look),
                every(STALLED_LOOK_S, self.generation.drop_stalled),
                every(WINDOW_S, self.auditor.flush),
                every(PINS_S, partial(renew_pins, self.models)),
                every(REPORT_S, partial(self.generation.rollouts.report, self.store)),
                every(REFRESH_S, self._refresh_gauges),
            ):
                tasks.create_task(work)
            for redis in self.servers.clients:
                tasks.create_task(every(POLICY_LOOK_S, EvictionWatch(redis, evicted).look, passing=REDIS_DOWN))
            if len(self.servers.cells) > 1:
                tasks.create_task(every(LOOK_S, self.cells.look_at_drained, passing=REDIS_DOWN))

    async def _follow_workers(self) -> None:
        """Follow which workers are alive and reach this router, and set the router's health; never returns."""
        health, once = False, LogOnce(log, logging.INFO)
        while True:
            await look_at_workers(self.models, self.dispatcher, self.reach, self.cells)
            waits_for = self._waits_for()
            once(f"waits for {waits_for}" if waits_for else "serves")
            self.metrics.health.set(f"waits for {waits_for}" if waits_for else "")
            if health != (not waits_for):
                health = not waits_for
                await self.public.set_serving(health)
            await asyncio.sleep(LOOK_S)

    async def _refresh_gauges(self) -> None:
        metrics, models = self.metrics, self.models
        slots = sum(state.slots_total for model in models.served for state in models.workers(model.manifest.name))
        count_jobs(metrics, tuple(self.dispatcher.jobs), slots)
        for model in models.served:
            name = model.manifest.name
            count_workers(metrics, name, models.workers(name), model.manifest.digest)
            with suppress(*REDIS_DOWN):  # keep the last count; other metrics show the outage
                waiting = [await cell.queue.count_waiting() for cell in models.reached(model)]
                metrics.waiting.labels(name).set(sum(waiting))

    async def stop(self) -> None:
        """End the streams, which may end by themselves until then; then the relay, which they need; then the rest."""
        await self._drain()
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self.dispatcher.drain_tasks()
        await self.quotas.drain(HAND_OVER_S)
        await self.relay.stop(HAND_OVER_S)
        for closing in (self.prompts, self.proofs, self.auditor):
            closing.close()
        if self.hook is not None:
            await self.hook.close()
        await asyncio.gather(self.store.close(), *(one.aclose() for one in self.servers.clients))

    async def _drain(self) -> None:
        """Take no new calls; after --drain-s end those that still run, which are resumed at another router."""
        self.metrics.health.stop()
        if self.relay_service.block_feed is not None:
            self.relay_service.block_feed.stop()
        await asyncio.sleep(ACCEPT_S)
        stopping = asyncio.create_task(self.public.stop(self.settings.drain_s + HAND_OVER_S))
        await asyncio.wait({stopping}, timeout=self.settings.drain_s)
        if self.generation is not None:
            self.generation.drain()
        await stopping
        if self.generation is not None:
            await self.generation.rollouts.close(self.store)


def _dispatcher(
    settings: RouterSettings, models: Models, reach: RelayReach, plans: Plans, metrics: RouterMetrics, cells: Cells
) -> Dispatcher:
    placer = Placer(
        lambda *place: reach.linked(models.serving(*place)),
        plans.weight_of,
        settings.adapter_mib_tokens,
        plans.queue_share_of,
        lambda: plans.key_terms(calling_key()),
        models.live.homes_of,
        cells.fits_elsewhere,
    )
    return Dispatcher(
        *(models.queue_of, placer.place, metrics),
        links=reach.links,
        cells=cells,
        why_unservable=models.why_unservable,
    )


async def look_at_workers(models: Models, dispatcher: Dispatcher, reach: RelayReach, cells: Cells) -> None:
    """Dispatch the jobs of lost workers and cells again, and end those that no worker can claim."""
    living = await models.look_at_workers()
    cells.update(models.live.sights(), dispatcher.waiting)
    if living is None:
        reach.forget()
        return
    dispatcher.update_live_workers(living)
    names = (model.manifest.name for model in models.served)
    for name in reach.look({name: models.serving(name) for name in names}):
        dispatcher.fail_waiting(name, reach.refusal)


# Interval in seconds between refreshes.
REFRESH_S = 1.0
# Maximum number of adapters that a label names: it is sent with each scrape.
ADAPTERS_NAMED = 1_000


def count_jobs(metrics: RouterMetrics, jobs: Sequence[RoutedJob], slots: int) -> None:
    """Set the gauges of this router's jobs and their adapters; `slots` is the number of all workers' adapter slots."""
    running = [routed for routed in jobs if routed.link is not None]
    queued = [routed for routed in jobs if routed.link is None]
    metrics.open_requests.labels("running").set(len(running))
    metrics.open_requests.labels("queued").set(len(queued))
    metrics.lora_requests.clear()
    metrics.lora_requests.labels(slots, _adapters(running), _adapters(queued)).set(time.time())


def count_workers(metrics: RouterMetrics, model: str, workers: Sequence[WorkerState], live_digest: str) -> None:
    """Set the gauges of a model's live workers, of the live revision and of other revisions."""
    phases = Counter((state.phase, state.base_digest == live_digest) for state in workers)
    for phase, is_live in product(WorkerPhase, (True, False)):
        metrics.workers.labels(model, phase.value, "live" if is_live else "other").set(phases[phase, is_live])
    blocks = sum(state.blocks_total for state in workers)
    used = sum(state.blocks_referenced for state in workers)
    metrics.kv_usage.labels(model).set(used / blocks if blocks else 0.0)


def _adapters(jobs: Sequence[RoutedJob]) -> str:
    """Return the full names of the jobs' adapters, with commas; weighted sets have none."""
    revisions = {routed.job.adapter.revision for routed in jobs if routed.job.adapter and not routed.job.adapter.parts}
    return ",".join(sorted({str(parse_revision_name(name).adapter_name) for name in revisions})[:ADAPTERS_NAMED])
