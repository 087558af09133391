"""Wiring, start and ordered stop of a runner: it leases batches, and runs some of them at once."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from loraplex.batches.v1 import batches_pb2 as pb
from loraplex.batches.v1 import batches_pb2_grpc

from loraplex.batch_runner.batch_run import BatchRun, LeaseLost
from loraplex.batch_runner.line_call import make_client
from loraplex.batch_runner.metrics import RunnerMetrics
from loraplex.batch_runner.pace import LinePace
from loraplex.batch_runner.settings import RunnerSettings
from loraplex.runtime.rpc.server import stop_signal
from loraplex.runtime.rpc.tasks import unless_stopped
from loraplex.runtime.telemetry.logging import LogOnce
from loraplex.runtime.telemetry.metrics import serve_metrics
from loraplex.runtime.tenancy.certificates import end_of
from loraplex_client import AsyncClient, LoraplexError
from loraplex_client.calls import Call, Script
from loraplex_client.connection import AsyncConnection
from loraplex_client.endpoint import Credentials

log = logging.getLogger(__name__)

# Interval in seconds between looks for a batch, and pause after one whose run failed by a fault of the runner's own.
LOOK_S, FAULT_S = 0.5, 10.0
# Timeout in seconds of a look, and of giving a batch back.
_ASK_S = 5.0


def _lease() -> Script[pb.LeaseBatchResponse]:
    lease: pb.LeaseBatchResponse = yield Call("LeaseBatch", pb.LeaseBatchRequest(), timeout_s=_ASK_S, once=True)
    return lease


async def lease_batch(store: AsyncConnection, client: AsyncClient, metrics: RunnerMetrics) -> BatchRun | None:
    """Lease a batch that no other runner has; None: there is none. Raises LoraplexError."""
    lease = await store.run(_lease())
    return BatchRun(lease, store, client, metrics) if lease.HasField("batch") else None


class BatchRunner:
    """Leases batches and runs them until it is told to stop."""

    def __init__(self, settings: RunnerSettings, metrics: RunnerMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        stub = batches_pb2_grpc.BatchServiceStub
        self._store = AsyncConnection(settings.store, stub, credentials=Credentials("", settings.tls))
        self._client = make_client(settings.router, settings.store, settings.tls)
        self._running: dict[asyncio.Task[None], BatchRun] = {}
        self._away = LogOnce(log)

    async def follow(self) -> None:
        """Run what there is; never returns."""
        while True:
            while len(self._running) < self._settings.batches_at_once and await self._begin():
                pass
            await asyncio.sleep(LOOK_S)

    async def _begin(self) -> bool:
        """Begin a batch; returns whether there was one."""
        try:
            run = await lease_batch(self._store, self._client, self._metrics)
        except LoraplexError as error:
            self._away(f"no batches: {error.message}")
            return False
        self._away.reset()
        if run is None:
            return False
        task = asyncio.create_task(self._run(run))
        self._running[task] = run
        task.add_done_callback(self._running.pop)
        return True

    async def _run(self, run: BatchRun) -> None:
        log.info("%s: runs", run.name)
        with self._metrics.batches.track_inprogress():
            try:
                await run.run(LinePace(self._settings.lines_at_once, self._settings.slowdown))
                log.info("%s: %s", run.name, run.batch.state)
            except LeaseLost as error:
                self._metrics.lost.inc()
                log.warning("%s: %s", run.name, error)
            except Exception:
                log.exception("%s: its run failed; it is taken up again", run.name)
                await asyncio.sleep(FAULT_S)

    async def stop(self) -> None:
        """Let lines end for a while, and give the batches back."""
        running = dict(self._running)
        for run in running.values():
            run.leave()
        if running:
            await asyncio.wait(running, timeout=self._settings.drain_s)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for run in running.values():
            with suppress(LoraplexError, TimeoutError):
                async with asyncio.timeout(_ASK_S):
                    await run.release()
        await asyncio.gather(self._client.close(), self._store.close())


async def run(settings: RunnerSettings) -> None:
    """Run batches until SIGTERM or SIGINT. Raises MetricsPortError before it begins."""
    stop, metrics = stop_signal(), RunnerMetrics()
    metrics_server = serve_metrics(metrics, settings.host, settings.metrics_port)
    if settings.tls_cert:
        metrics.certificate_end.set_function(lambda: end_of(Path(settings.tls_cert).read_bytes()))
    runner = BatchRunner(settings, metrics)
    metrics.health.set()
    print(f"ready runner={settings.store}{metrics.ready_word}", flush=True)
    await unless_stopped(stop, runner.follow())
    metrics.health.stop()
    log.info("stops; running lines get %g s", settings.drain_s)
    await runner.stop()
    if metrics_server is not None:
        await asyncio.to_thread(metrics_server.close)
