"""The router's wiring, start and ordered stop."""

from __future__ import annotations

import asyncio
import logging

from loraplex.cluster.v1 import cluster_pb2_grpc
from loraplex.inference.v1 import inference_pb2_grpc
from loraplex.relay.v1 import relay_pb2_grpc

from broker.connection import connect
from router.cluster import ClusterService
from router.dispatch import Dispatcher
from router.generation import Generation
from router.models import WATCH_S, Models
from router.placement import Placer
from router.relay import RelayService
from router.service import InferenceService
from router.settings import Settings, read_weights
from router.store_client import StoreClient
from rpc.server import RELAY_MESSAGE_BYTES, Server, stop_signal

log = logging.getLogger(__name__)


async def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortInUse or RedisUnreachableError before it serves."""
    stop = stop_signal()
    redis = await connect(settings.redis_url)
    store = StoreClient(settings.store)
    models = Models(store, redis, settings.cell, settings.queue_limits)
    placer = Placer(models.serving, read_weights(settings.tenant_weights), settings.adapter_mib_tokens)
    dispatcher = Dispatcher(models.queue_of, placer.place)
    relay_service = RelayService(dispatcher)
    public, relay = Server(), Server(message_bytes=RELAY_MESSAGE_BYTES)
    watching: asyncio.Task[None] | None = None
    try:
        relay_port = relay.bind(settings.relay_host, settings.relay_port)
        reply_to = f"{settings.relay_advertise or settings.relay_host}:{relay_port}"
        generation = Generation(models, store, dispatcher, reply_to)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceService(generation, models), public.grpc)
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(ClusterService(models, dispatcher), public.grpc)
        relay_pb2_grpc.add_RelayServiceServicer_to_server(relay_service, relay.grpc)
        port = public.bind(settings.host, settings.port)
        await relay.start()
        await public.start()
        print(f"ready router={settings.host}:{port}", flush=True)
        watching = asyncio.create_task(_watch(public, models, dispatcher))
        await asyncio.wait({watching, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()  # it watches for ever: this raises what ended it, and the process fails
    finally:
        # Streams may end, and be recovered until then; then the relay, which they need; then what both stand on.
        await public.stop(settings.drain_s)
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await dispatcher.settle()
        relay_service.close()
        await relay.stop(1.0)
        await store.close()
        await redis.aclose()


async def _watch(public: Server, models: Models, dispatcher: Dispatcher) -> None:
    """Forever: follow store and workers, dispatch again what was lost, and tell the truth as health."""
    async with asyncio.TaskGroup() as tasks:  # one that fails ends the router: all of them are needed
        tasks.create_task(dispatcher.watch())
        tasks.create_task(models.follow_store())
        tasks.create_task(_follow_workers(public, models, dispatcher))


async def _follow_workers(public: Server, models: Models, dispatcher: Dispatcher) -> None:
    health, told = False, ""
    while True:
        await models.follow_workers(dispatcher)
        waits_for = models.waits_for()
        if waits_for != told:
            log.info("waits for %s", waits_for) if waits_for else log.info("serves")
            told = waits_for
        if health != (not waits_for):
            health = not waits_for
            await public.set_serving(health)
        await asyncio.sleep(WATCH_S)
