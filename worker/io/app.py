"""The I/O process: announces that it lives, starts the engine, and starts another when the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.base_model import read_base_model
from broker.startup import connect_once_up
from rpc.server import Server, stop_signal
from rpc.tasks import every, unless_stopped
from telemetry.metrics import serve_metrics
from telemetry.tracing import set_up_tracing
from tenancy.audit_log import AuditLog
from tenancy.auditor import WINDOW_S, RefusedCallers
from worker.io.adapters.disk import DiskTier
from worker.io.adapters.fetch import AdapterFetcher, DownloadTimeouts
from worker.io.engine_client import EngineBreaker, EngineLostError, EngineUnusableError
from worker.io.engine_session import EngineSession
from worker.io.metrics import WorkerMetrics
from worker.io.results import JobTelemetry
from worker.io.settings import Settings

if TYPE_CHECKING:
    from worker.io.credentials import WorkerCredentials

log = logging.getLogger(__name__)

# Seconds until another engine is started, first and at most: the pause doubles while engines die before they serve.
RESTART_S = 0.1
RESTART_LIMIT_S = 10.0
# Number of engines that may die one after the other before the first one has served; then the worker ends, since the
# next would die as well.
START_DEATHS_LIMIT = 3


async def run(settings: Settings) -> None:
    """Work until SIGTERM or SIGINT; the second one ends the process at once.

    Raises ArtifactError, PortInUse, MetricsPortError, RedisUnreachableError or EngineUnusableError.
    """
    stop = stop_signal()
    chosen = settings.quantize, settings.kv_cache_dtype
    base = await asyncio.to_thread(read_base_model, settings.model, settings.model_name, *chosen)
    worker_id = settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"
    metrics = WorkerMetrics()
    audit = AuditLog(settings.audit, "worker", metrics.audit)
    refusals = RefusedCallers(audit)
    credentials = _credentials(settings, metrics, refusals)
    if credentials is not None:
        worker_id = credentials.link.named(worker_id)
    spans = set_up_tracing("worker", os.environ)
    telemetry = JobTelemetry(metrics, spans, worker_id)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(audit.close)
        stack.callback(refusals.flush)
        flushing = asyncio.create_task(every(WINDOW_S, refusals.flush))
        stack.callback(flushing.cancel)
        stack.push_async_callback(asyncio.to_thread, spans.close)
        metrics_server = serve_metrics(metrics, settings.health_host, settings.metrics_port)
        if metrics_server is not None:
            stack.callback(metrics_server.close)
        health = Server()
        address = f"{settings.health_host}:{health.bind(settings.health_host, settings.health_port)}"
        await health.start()
        stack.push_async_callback(health.stop, 0)
        metrics.ready_word += f" health={address}"
        log.info("health at %s", address)
        redis = await unless_stopped(stop, connect_once_up(settings.redis_url))
        if redis is None:
            return
        stack.push_async_callback(redis.aclose)
        disk = await asyncio.to_thread(_open_disk, settings)
        stack.push_async_callback(disk.close)
        timeouts = DownloadTimeouts(settings.fetch_s, settings.fetch_silent_s)
        tls = credentials.link.tls if credentials else None
        fetcher = AdapterFetcher(settings.store, disk, timeouts, metrics, tls=tls)
        stack.push_async_callback(fetcher.close)
        breaker = EngineBreaker()
        await run_sessions(
            lambda: EngineSession(settings, base, redis, fetcher, health, telemetry, breaker, credentials),
            *(stop, metrics),
        )


async def run_sessions(
    new_session: Callable[[], EngineSession],
    stop: asyncio.Event,
    metrics: WorkerMetrics,
    *,
    restart_s: float = RESTART_S,
) -> None:
    """Run one engine session after the other until told to stop.

    Raises EngineUnusableError, also where START_DEATHS_LIMIT engines died and none has served.
    """
    pause_s, ever_served, start_deaths = restart_s, False, 0
    while not stop.is_set():
        session = new_session()
        try:
            await session.run(stop)
        except EngineLostError as error:
            metrics.engines_lost.inc()
            log.error("%s; %s", error, "stopping" if stop.is_set() else "starting another")
            ever_served = ever_served or session.served
            start_deaths += 1
            if not ever_served and start_deaths >= START_DEATHS_LIMIT:
                raise EngineUnusableError(
                    f"{error} before it served, as the {start_deaths - 1} engines before it; "
                    "see their messages in the worker's log (`loraplex up --data-dir DIR` keeps it)"
                ) from error
            pause_s = restart_s if session.served else min(RESTART_LIMIT_S, pause_s * 2)
            await unless_stopped(stop, asyncio.sleep(pause_s))


def _credentials(settings: Settings, metrics: WorkerMetrics, refusals: RefusedCallers) -> WorkerCredentials | None:
    if (tls := settings.tls_files()) is None:
        return None
    from worker.io.credentials import credentials_of

    return credentials_of(tls, settings.job_key, metrics, refusals)


def _open_disk(settings: Settings) -> DiskTier:
    if settings.cache_dir:
        return DiskTier.open(Path(settings.cache_dir), settings.disk_adapter_bytes)
    temporary = tempfile.mkdtemp(prefix="loraplex-adapters-")
    return DiskTier.open(Path(temporary), settings.disk_adapter_bytes, temporary=True)
