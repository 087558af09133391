"""Wiring, start and ordered stop of a runner: it leases batches, and runs some of them at once."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
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

# Interval in seconds between looks for a batch, pause after one whose run failed by a fault of this machine, and time
# for which a batch waits for its quota before it gives its place to another tenant's.
LOOK_S, FAULT_S, WAIT_S = 0.5, 10.0, 10.0
# Timeout in seconds of a look, and of giving a batch back.
_ASK_S = 5.0


def _lease(request: pb.LeaseBatchRequest) -> Script[pb.LeaseBatchResponse]:
    lease: pb.LeaseBatchResponse = yield Call("LeaseBatch", request, timeout_s=_ASK_S, once=True)
    return lease


async def lease_batch(
    store: AsyncConnection, client: AsyncClient, metrics: RunnerMetrics, except_tenants: Iterable[str] = ()
) -> BatchRun | None:
    """Lease a batch that no other runner has; None: there is none. Raises LoraplexError."""
    lease = await store.run(_lease(pb.LeaseBatchRequest(except_tenants=except_tenants)))
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
            while await self._begin():
                pass
            await asyncio.sleep(LOOK_S)

    def _place(self) -> tuple[BatchRun | None, set[str]]:
        """Return the batch that gives its place to another, and the tenants whose batches may not have it.

        It is the one that has waited longest for its quota, or the newest of a tenant that has more places than others.
        """
        runs = [run for run in self._running.values() if not run.leaves]
        waiting = [run for run in runs if run.waits_s >= WAIT_S]
        if waiting:
            return max(waiting, key=lambda run: run.waits_s), {run.tenant for run in waiting}
        places = Counter(run.tenant for run in runs)
        tenant, most = places.most_common(1)[0]
        if most == 1:
            return None, set()
        return [run for run in runs if run.tenant == tenant][-1], {one for one in places if places[one] > most - 2}

    async def _begin(self) -> bool:
        """Begin a batch; returns whether there was one, and a place for it."""
        leaver, others = None, set[str]()
        if sum(not run.leaves for run in self._running.values()) >= self._settings.batches_at_once:
            leaver, others = self._place()
            if leaver is None:
                return False
        try:
            run = await lease_batch(self._store, self._client, self._metrics, others)
        except LoraplexError as error:
            self._away(f"no batches: {error.message}")
            return False
        self._away.reset()
        if run is None:
            return False
        if run.tenant in others:  # a store of an older version does not know that it was not asked for
            await _give_back(run)
            return False
        if leaver is not None:
            log.info("%s gives its place to %s", leaver.name, run.name)
            leaver.leave()
        task = asyncio.create_task(self._run(run))
        self._running[task] = run
        task.add_done_callback(self._running.pop)
        return True

    async def _run(self, run: BatchRun) -> None:
        log.info("%s: runs", run.name)
        with self._metrics.batches.track_inprogress():
            try:
                await run.run(LinePace(self._settings.lines_at_once, self._settings.slowdown))
            except LeaseLost as error:
                self._metrics.lost.inc()
                log.warning("%s: %s", run.name, error)
            except OSError:
                log.exception("%s: its run failed by a fault of this machine", run.name)
                await _give_back(run)
                await asyncio.sleep(FAULT_S)
            except Exception as error:
                log.exception("%s: its run failed", run.name)
                why = f"an internal error ({type(error).__name__}); the runner's log says more"
                await _give_back(run, error.message if isinstance(error, LoraplexError) else why)
            except asyncio.CancelledError:
                await _give_back(run)
                raise
            else:
                if run.leaves:
                    await _give_back(run)
                log.info("%s: %s", run.name, run.batch.state)

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
        await asyncio.gather(self._client.close(), self._store.close())


async def _give_back(run: BatchRun, fault: str = "") -> None:
    with suppress(LoraplexError, TimeoutError):
        async with asyncio.timeout(_ASK_S):
            await run.release(fault)


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
