"""Wiring, start and ordered stop of a router."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Iterable
from pathlib import Path

from redis.asyncio import Redis

from broker.eviction import EvictionWatch
from broker.ledger import LedgerCalls
from broker.startup import connect_once_up
from router.api.cluster import ClusterService
from router.api.operator_commands import AdapterCommands
from router.api.request_telemetry import RequestTelemetry
from router.api.service import InferenceService
from router.api.sglang.intake import Intake
from router.catalog.live_workers import LOOK_S
from router.catalog.models import Models
from router.catalog.placement import Placer
from router.catalog.store_client import StoreClient
from router.dispatch.advertised import check_advertised
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.reach import RelayReach
from router.gauges import follow_gauges
from router.generation.admission import Admission
from router.generation.encode_admission import EncodeAdmission
from router.generation.encoding import Encoding
from router.generation.generation import Generation
from router.generation.grammar_proofs import GrammarProofs
from router.generation.resume import ResumeTokens
from router.generation.resume_epochs import ResumeEpochs
from router.generation.resume_keys import GivenKeys
from router.metrics import RouterMetrics
from router.purge.cell import CellPurge
from router.purge.router_data import RouterData
from router.quotas.plan_copy import PlanCopy
from router.quotas.plans import Plans
from router.quotas.quotas import Quotas
from router.quotas.usage import UsageLog, calling_key
from router.seals import renew_pins, resume_keys_of, seals_of
from router.servers import add_services, make_servers
from router.settings import Settings, read_weights
from router.text.prompt_encoder import PromptEncoder
from router.worker_watch import look_at_workers
from rpc.audit.auditor import Auditor
from rpc.identity.access import GuardedServers
from rpc.server import stop_signal, unless_stopped
from telemetry.audit.log import AuditLog
from telemetry.metrics import serve_metrics
from telemetry.tracing import Spans, set_up_tracing

log = logging.getLogger(__name__)

# Time in seconds that calls get to send their last status when the router stops.
HAND_OVER_S = 1.0
# Time in seconds in which a router that stops still takes calls: gRPC cancels those that wait to be accepted, and their
# clients cannot know that nothing was computed.
ACCEPT_S = 0.25


async def run(settings: Settings, *, supervised: bool = False) -> None:
    """Serve until SIGTERM or SIGINT.

    A supervised router shares the ports of tenants with others, and drains to its end, however many signals come: the
    supervisor sends one, and whoever stops the whole group another.
    Raises PlansError, AuditFileError, PortInUse, RedisUnreachableError or AdvertisedAddressError before it serves.
    """
    stop, store = stop_signal(second_ends=not supervised), StoreClient(settings.store, tls := settings.tls_files())
    plans = Plans(Path(settings.plans) if settings.plans else None, PlanCopy(store))
    metrics, spans = RouterMetrics(), set_up_tracing("router", os.environ)
    metrics_server = serve_metrics(metrics, settings.host_of_operators(settings.host), settings.metrics_port)
    redis = await unless_stopped(stop, connect_once_up(settings.redis_url))
    if redis is None:
        return
    models = Models(
        store,
        redis,
        settings.cell,
        settings.queue_limits,
        seals=(seals := seals_of(tls, settings.job_key)),
        set_aside=lambda key: metrics.keys_set_aside.labels(key).inc(),
    )
    dispatcher = _dispatcher(settings, models, reach := RelayReach(metrics), plans, metrics)
    telemetry, auditor = _records(settings, metrics, spans, models)
    plans.record = auditor.record
    encoder, proofs, quotas = PromptEncoder(), GrammarProofs(), _quotas(settings, redis, plans, metrics, store)
    public, relay = make_servers(settings, tls, telemetry, store, auditor, seals, supervised)
    resume_keys, relay_service = resume_keys_of(settings, redis, seals), relay.service(dispatcher, metrics)
    following: asyncio.Task[None] | None = None
    generation: Generation | None = None
    try:
        relay_port = relay.bind(settings.relay_host, settings.relay_port)
        reply_to = reach.address = f"{settings.relay_name}:{relay_port}"
        models.announce(reply_to)
        await asyncio.gather(resume_keys.look(), plans.look())
        admission = Admission(models, store, reply_to, reach, encoder, proofs)
        generation = Generation(
            models,
            admission,
            dispatcher,
            ResumeTokens(resume_keys, ResumeEpochs(store, public.keys)),
            quotas,
            client_stall_s=settings.client_stall_s,
        )
        encoding = Encoding(generation, EncodeAdmission(models, store, reply_to, reach, encoder))
        configs = admission.configs, encoding.admission.classifiers.configs
        data = relay.serve_tenant_data(RouterData(dispatcher, store, configs, encoder, proofs, quotas), auditor.record)
        intake = Intake(models, telemetry, generation, encoding, dispatcher, AdapterCommands(models, store), encoder)
        cluster = ClusterService(
            *(models, dispatcher, metrics, intake.commands),
            CellPurge(models, redis, data, relay_service.forgets, reply_to, tls),
        )
        add_services(
            public,
            settings,
            InferenceService(generation, admission, models, telemetry, encoder, encoding),
            cluster,
            intake,
            lambda: models.waits_for() or reach.waits_for(),
        )
        addresses = public.bind(settings.host, settings.port)
        await relay.server.start()
        await public.start()
        await unless_stopped(stop, check_advertised(settings.relay_name, relay_port, relay_service.router_id, tls))
        print(f"ready router={' '.join(addresses)}{metrics.ready_word}", flush=True)
        following = asyncio.create_task(
            _follow(
                public,
                models,
                dispatcher,
                reach,
                metrics,
                generation,
                resume_keys,
                [
                    EvictionWatch(redis, metrics.evicted_keys.inc).follow(),
                    quotas.follow(),
                    auditor.follow(),
                    renew_pins(models),
                ],
            )
        )
        await _run_until(stop, following)
    finally:
        # First the streams, which may end or be recovered until then; then the relay, which they need; then the rest.
        await _drain(public, generation, settings.drain_s)
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await dispatcher.drain_tasks()
        await quotas.drain(HAND_OVER_S)
        await relay.stop(HAND_OVER_S)
        for closing in (encoder, proofs, auditor):
            closing.close()
        await asyncio.gather(store.close(), redis.aclose())
        if metrics_server is not None:
            metrics_server.close()
        await asyncio.to_thread(spans.close)


def _dispatcher(
    settings: Settings, models: Models, reach: RelayReach, plans: Plans, metrics: RouterMetrics
) -> Dispatcher:
    placer = Placer(
        lambda name, digest: reach.linked(models.serving(name, digest)),
        plans.weights_over(read_weights(settings.tenant_weights)),
        settings.adapter_mib_tokens,
        plans.queue_share_of,
        lambda: plans.key_terms(calling_key()),
    )
    return Dispatcher(models.queue_of, placer.place, metrics, links=reach.links, why_unservable=models.why_unservable)


def _records(
    settings: Settings, metrics: RouterMetrics, spans: Spans, models: Models
) -> tuple[RequestTelemetry, Auditor]:
    return RequestTelemetry(metrics, spans, models), Auditor(AuditLog(settings.audit, "router", metrics.audit))


def _quotas(settings: Settings, redis: Redis, plans: Plans, metrics: RouterMetrics, store: StoreClient) -> Quotas:
    path, url = settings.usage_file, settings.usage_url
    usage = UsageLog(redis, Path(path), metrics, url) if path else None
    return Quotas(LedgerCalls(redis), plans, metrics, usage, store)


async def _run_until(stop: asyncio.Event, following: asyncio.Task[None]) -> None:
    """Return when the router is told to stop. Raises what ended `following`, which never returns."""
    await asyncio.wait({following, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if following.done():
        following.result()


async def _drain(public: GuardedServers, generation: Generation | None, drain_s: float) -> None:
    """Take no new calls; after `drain_s` end those that still run, which are resumed at another router."""
    await asyncio.sleep(ACCEPT_S)
    stopping = asyncio.create_task(public.stop(drain_s + HAND_OVER_S))
    await asyncio.wait({stopping}, timeout=drain_s)
    if generation is not None:
        generation.drain()
    await stopping


async def _follow(
    public: GuardedServers,
    models: Models,
    dispatcher: Dispatcher,
    reach: RelayReach,
    metrics: RouterMetrics,
    generation: Generation,
    resume_keys: GivenKeys,
    further: Iterable[Coroutine[None, None, None]],
) -> None:
    """Follow the store, the workers, the resume keys, the router's own jobs and `further`; never returns."""
    async with asyncio.TaskGroup() as tasks:  # one that fails ends the router: all of them are needed
        tasks.create_task(dispatcher.redispatch_missing())
        tasks.create_task(models.follow_store())
        tasks.create_task(resume_keys.follow())
        tasks.create_task(public.follow())
        tasks.create_task(generation.slow_clients.drop_stalled())
        for one in further:
            tasks.create_task(one)
        tasks.create_task(_follow_workers(public, models, dispatcher, reach))
        tasks.create_task(follow_gauges(metrics, models, dispatcher))


async def _follow_workers(public: GuardedServers, models: Models, dispatcher: Dispatcher, reach: RelayReach) -> None:
    """Follow which workers are alive and reach this router, and set the router's health; never returns."""
    health, last_logged = False, ""
    while True:
        await look_at_workers(models, dispatcher, reach)
        waits_for = models.waits_for() or reach.waits_for()
        if waits_for != last_logged:
            log.info("waits for %s", waits_for) if waits_for else log.info("serves")
            last_logged = waits_for
        if health != (not waits_for):
            health = not waits_for
            await public.set_serving(health)
        await asyncio.sleep(LOOK_S)
