"""The servers of a router, and its wiring, start and ordered stop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
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
from loraplex.router.dispatch.block_feed import BlockFeed
from loraplex.router.dispatch.cells import Cells
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import RelayReach
from loraplex.router.dispatch.outbox import Placer
from loraplex.router.dispatch.relay import RelayService, check_advertised
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.generation.admission import Admission, GrammarProofs
from loraplex.router.generation.generation import STALLED_LOOK_S, Generation
from loraplex.router.generation.resume import LOOK_S as KEYS_S
from loraplex.router.generation.resume import ResumeEpochs, ResumeKeys, ResumeTokens
from loraplex.router.generation.rollouts import REPORT_S
from loraplex.router.metrics import RouterMetrics
from loraplex.router.purge import CellPurge, RouterData, TenantDataService
from loraplex.router.quotas.plans import Plans
from loraplex.router.quotas.quotas import Quotas
from loraplex.router.quotas.usage import UsageLog
from loraplex.router.settings import ENGINE_PROTOCOLS, Settings
from loraplex.router.text.tokenizer import PromptTokenizer
from loraplex.runtime.rpc.errors import CallError, PermissionDenied
from loraplex.runtime.rpc.interceptors import CallMeter, Interceptor
from loraplex.runtime.rpc.principal import Principal, Role, calling_key
from loraplex.runtime.rpc.server import Server, channel_options, relay_options, stop_signal
from loraplex.runtime.rpc.tasks import every, unless_stopped
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.telemetry.logging import LogOnce
from loraplex.runtime.telemetry.metrics import Health, serve_metrics
from loraplex.runtime.telemetry.tracing import set_up_tracing
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


def make_servers(
    settings: Settings,
    tls: TlsFiles | None,
    telemetry: RequestTelemetry,
    store: StoreClient,
    auditor: Auditor,
    seals: Seals | None,
    shared_ports: bool,
) -> tuple[GuardedServers, RelayAccess]:
    """Return the servers for tenants and operators, and the relay's; all report whom they refuse.

    `shared_ports`: other processes may listen on the ports of tenants as well.
    """
    keys = KeyDirectory(stale_s=settings.store_away_s)
    telemetry.metrics.keys_age.set_function(keys.age_s)
    if tls is not None:
        telemetry.metrics.certificate_end.set_function(lambda: end_of(tls.content.cert))
    follow_keys = partial(every, KEYS_LOOK_S, KeyCopy(store, keys).look)

    def refused(method: str, caller: Principal | None, error: CallError, peer: str) -> None:
        telemetry.refused_caller(method, caller, error)
        auditor.refused(method, caller, error, peer)

    if seals is not None:  # what is not opened is reported as callers are
        seals.on_refused = lambda kind, error: refused(
            f"redis/{kind}", None, PermissionDenied(str(error), error.reason), "redis:"
        )
    make = partial(_server, settings, telemetry, auditor, shared_ports)
    return GuardedServers(settings, tls, make, keys, refused, follow_keys), RelayAccess(tls, refused)


def add_services(
    servers: GuardedServers,
    settings: Settings,
    inference: InferenceService,
    cluster: ClusterService,
    dispatcher: Dispatcher,
    commands: AdapterCommands,
    block_feed: BlockFeed,
    waits_for: Callable[[], str],
) -> None:
    """Serve the services, where the permissions table lets somebody call them.

    `waits_for` returns what is missing before requests can be served, or nothing.
    """
    servers.add(lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server))
    servers.add(lambda server: cluster_pb2_grpc.add_ClusterServiceServicer_to_server(cluster, server))
    if settings.engine_protocol:
        parts = inference, dispatcher, commands, block_feed, settings.engine_adapter, waits_for
        servers.add(_engine_protocol(settings).SglangScheduler(*parts).register)


def _engine_protocol(settings: Settings) -> Any:
    """Import the module of the protocol, whose package need not be installed where it is not served."""
    return import_module(ENGINE_PROTOCOLS[settings.engine_protocol])


def _server(
    settings: Settings, telemetry: RequestTelemetry, auditor: Auditor, shared_ports: bool, guard: Guard, port: Port
) -> Server:
    meter = CallMeter(*telemetry.metrics.calls, COUNTED_METHODS)
    if port is Port.OPERATORS:
        return Server(guard, outer=[meter], interceptors=[auditor])
    open_calls = OpenCalls(settings.open_calls_limit, settings.open_bytes_limit, telemetry.refused)
    inner: list[Interceptor] = [open_calls, auditor]
    if settings.engine_protocol:
        inner.insert(0, _engine_protocol(settings).UnnamedCallers(settings.engine_tenant))
    # More calls of one connection than the limit of open calls, so that this limit refuses them.
    options = [*channel_options(), ("grpc.max_concurrent_streams", 2 * settings.open_calls_limit)]
    return Server(guard, outer=[meter], interceptors=inner, options=options, shared_ports=shared_ports)


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

    def serve_tenant_data(self, data: RouterData, record: Callable[..., None]) -> RouterData:
        """Let other routers remove this router's data of tenants; `record` keeps an event of the audit log."""
        relay_pb2_grpc.add_TenantDataServiceServicer_to_server(TenantDataService(data, record), self.server.services)
        return data

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


def resume_keys_of(settings: Settings, redis: Redis, seals: Seals | None) -> ResumeKeys:
    """Return the keys of resume tokens: the given ones, derived ones, or without credentials those in Redis."""
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


async def run(settings: Settings, *, supervised: bool = False) -> None:
    """Serve until SIGTERM or SIGINT.

    A supervised router shares the ports of tenants with others, and drains to its end, however many signals come: the
    supervisor sends one, and whoever stops the whole group another.
    Raises AuditFileError, PortInUse, RedisUnreachableError or AdvertisedAddressError before it serves.
    """
    stop, store = (
        stop_signal(second_ends=not supervised),
        StoreClient(settings.store, tls := settings.tls_files(), settings.store_away_s),
    )
    plans = Plans(store)
    metrics, spans = RouterMetrics(), set_up_tracing("router", os.environ)
    metrics_server = serve_metrics(metrics, settings.host_of_operators(settings.host), settings.metrics_port)
    servers = await unless_stopped(stop, connect_cells(settings.redis_url, settings.cell_addresses))
    if servers is None:
        return
    models = _models(settings, store, servers, seals := seals_of(tls, settings.job_key), metrics, plans)
    cells = Cells(servers.names, (reach := RelayReach(metrics)).linked, DrainedCells(servers.home))
    dispatcher = _dispatcher(settings, models, reach, plans, metrics, cells)
    telemetry = RequestTelemetry(metrics, spans, models)
    auditor = Auditor(AuditLog(settings.audit, "router", metrics.audit))
    prompts, proofs, configs = PromptTokenizer(), GrammarProofs(), AdapterConfigs(store)
    quotas = _quotas(settings, servers.home, plans, metrics, store)
    public, relay = make_servers(settings, tls, telemetry, store, auditor, seals, supervised)
    commands = AdapterCommands(models, store)
    resume_keys, relay_service = resume_keys_of(settings, servers.home, seals), relay.service(dispatcher, metrics)
    following: asyncio.Task[None] | None = None
    generation: Generation | None = None
    try:
        relay_port = relay.bind(settings.relay_host, settings.relay_port)
        reply_to = reach.address = f"{settings.relay_name}:{relay_port}"
        models.announce(reply_to)
        await asyncio.gather(resume_keys.look(), plans.look())
        admission = Admission(models, store, configs, reply_to, reach, prompts, proofs)
        generation = Generation(
            *(admission, dispatcher, ResumeTokens(resume_keys, ResumeEpochs(store, public.keys)), quotas, prompts),
            client_stall_s=settings.client_stall_s,
        )
        data = relay.serve_tenant_data(
            RouterData(dispatcher, store, configs, prompts, proofs, quotas, generation.rollouts), auditor.record
        )
        cluster = ClusterService(
            *(models, dispatcher, metrics, commands),
            CellPurge(models, data, relay_service.forgets, reply_to, tls),
            *(resume_keys, CellCommands(models, cells)),
        )
        add_services(
            public,
            settings,
            InferenceService(generation, admission, telemetry),
            cluster,
            dispatcher,
            commands,
            relay_service.block_feed,
            lambda: models.waits_for() or reach.waits_for(),
        )
        addresses = public.bind(settings.host, settings.port)
        await relay.server.start()
        await public.start()
        await unless_stopped(stop, check_advertised(settings.relay_name, relay_port, relay_service.router_id, tls))
        _say_ready(addresses, metrics)
        following = asyncio.create_task(
            _follow(
                dispatcher.redispatch_missing(),
                every(LOOK_S, models.look_at_store),
                every(KEYS_S, resume_keys.look),
                public.follow(),
                every(STALLED_LOOK_S, generation.drop_stalled),
                *(
                    every(POLICY_LOOK_S, EvictionWatch(one, metrics.evicted_keys.inc).look, passing=REDIS_DOWN)
                    for one in servers.clients
                ),
                quotas.follow(),
                every(WINDOW_S, auditor.flush),
                every(PINS_S, partial(renew_pins, models)),
                every(REPORT_S, partial(generation.rollouts.report, store)),
                _follow_workers(public, models, dispatcher, reach, cells, metrics.health),
                *([every(LOOK_S, cells.look_at_drained, passing=REDIS_DOWN)] if len(servers.cells) > 1 else []),
                every(REFRESH_S, partial(refresh_gauges, metrics, models, dispatcher)),
            )
        )
        await _run_until(stop, following)
    finally:
        # First the streams, which may end or be recovered until then; then the relay, which they need; then the rest.
        await _drain(public, generation, settings.drain_s, metrics.health, store, relay_service.block_feed)
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await dispatcher.drain_tasks()
        await quotas.drain(HAND_OVER_S)
        await relay.stop(HAND_OVER_S)
        for closing in (prompts, proofs, auditor):
            closing.close()
        await asyncio.gather(store.close(), *(one.aclose() for one in servers.clients))
        if metrics_server is not None:
            metrics_server.close()
        await asyncio.to_thread(spans.close)


def _models(
    settings: Settings,
    store: StoreClient,
    servers: CellServers,
    seals: Seals | None,
    metrics: RouterMetrics,
    plans: Plans,
) -> Models:
    models = Models(
        *(store, servers.cells, settings.queue_limits),
        seals=seals,
    )
    models.default_model, models.scales_from_zero = plans.default_model, settings.scale_from_zero
    models.use_generation_config = settings.generation_config == "auto"
    models.unset_max_tokens = settings.default_max_tokens
    return models


def _dispatcher(
    settings: Settings, models: Models, reach: RelayReach, plans: Plans, metrics: RouterMetrics, cells: Cells
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


def _quotas(settings: Settings, redis: Redis, plans: Plans, metrics: RouterMetrics, store: StoreClient) -> Quotas:
    path, url = settings.usage_file, settings.usage_url
    usage = UsageLog(redis, Path(path), metrics, url) if path else None
    return Quotas(Ledger(redis), plans, metrics, usage, store)


async def _run_until(stop: asyncio.Event, following: asyncio.Task[None]) -> None:
    """Return when the router is told to stop. Raises what ended `following`, which never returns."""
    await asyncio.wait({following, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if following.done():
        following.result()


def _say_ready(addresses: Sequence[str], metrics: RouterMetrics) -> None:
    metrics.health.listens()
    print(f"ready router={' '.join(addresses)}{metrics.ready_word}", flush=True)


async def _drain(
    public: GuardedServers,
    generation: Generation | None,
    drain_s: float,
    probed: Health,
    store: StoreClient,
    block_feed: BlockFeed,
) -> None:
    """Take no new calls; after `drain_s` end those that still run, which are resumed at another router."""
    probed.stop()
    block_feed.stop()
    await asyncio.sleep(ACCEPT_S)
    stopping = asyncio.create_task(public.stop(drain_s + HAND_OVER_S))
    await asyncio.wait({stopping}, timeout=drain_s)
    if generation is not None:
        generation.drain()
    await stopping
    if generation is not None:
        await generation.rollouts.close(store)


async def _follow(*works: Coroutine[None, None, None]) -> None:
    """Run what follows the store, the workers, the keys and the router's own jobs; never returns."""
    async with asyncio.TaskGroup() as tasks:  # one that fails ends the router: all of them are needed
        for work in works:
            tasks.create_task(work)


async def _follow_workers(
    public: GuardedServers, models: Models, dispatcher: Dispatcher, reach: RelayReach, cells: Cells, probed: Health
) -> None:
    """Follow which workers are alive and reach this router, and set the router's health; never returns."""
    health, once = False, LogOnce(log, logging.INFO)
    while True:
        await look_at_workers(models, dispatcher, reach, cells)
        waits_for = models.waits_for() or reach.waits_for()
        once(f"waits for {waits_for}" if waits_for else "serves")
        probed.set(f"waits for {waits_for}" if waits_for else "")
        if health != (not waits_for):
            health = not waits_for
            await public.set_serving(health)
        await asyncio.sleep(LOOK_S)


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


async def refresh_gauges(metrics: RouterMetrics, models: Models, dispatcher: Dispatcher) -> None:
    """Set the gauges to what they are now."""
    count_jobs(metrics, tuple(dispatcher.jobs), _slots(models))
    for model in models.served:
        name = model.manifest.name
        count_workers(metrics, name, models.workers(name), model.manifest.digest)
        with suppress(*REDIS_DOWN):  # keep the last count; other metrics show the outage
            waiting = [await cell.queue.count_waiting() for cell in models.reached(model)]
            metrics.waiting.labels(name).set(sum(waiting))


def count_jobs(metrics: RouterMetrics, jobs: Sequence[RoutedJob], slots: int) -> None:
    """Set the gauges of this router's jobs and their adapters; `slots` is the number of all workers' adapter slots."""
    running = [routed for routed in jobs if routed.link is not None]
    queued = [routed for routed in jobs if routed.link is None]
    metrics.open_requests.labels("running").set(len(running))
    metrics.open_requests.labels("queued").set(len(queued))
    metrics.lora_requests.clear()
    metrics.lora_requests.labels(slots, _adapters(running), _adapters(queued)).set(time.time())


def count_workers(metrics: RouterMetrics, model: str, workers: Sequence[WorkerState], live_digest: str) -> None:
    """Set the gauges of a model's live workers: those that serve its live revision, and those of others."""
    phases = Counter((state.phase, state.base_digest == live_digest) for state in workers)
    for phase, is_live in product(WorkerPhase, (True, False)):
        metrics.workers.labels(model, phase.value, "live" if is_live else "other").set(phases[phase, is_live])
    blocks = sum(state.blocks_total for state in workers)
    used = sum(state.blocks_referenced for state in workers)
    metrics.kv_usage.labels(model).set(used / blocks if blocks else 0.0)


def _slots(models: Models) -> int:
    return sum(state.slots_total for model in models.served for state in models.workers(model.manifest.name))


def _adapters(jobs: Sequence[RoutedJob]) -> str:
    """Return the full names of the jobs' adapters, with commas; weighted sets have none."""
    revisions = {routed.job.adapter.revision for routed in jobs if routed.job.adapter and not routed.job.adapter.parts}
    return ",".join(sorted({str(parse_revision_name(name).adapter_name) for name in revisions})[:ADAPTERS_NAMED])
