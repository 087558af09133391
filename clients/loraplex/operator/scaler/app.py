"""The scaler's process: it looks at the cluster through a router, and answers KEDA and Prometheus."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from loraplex.cluster.v1 import cluster_pb2
from loraplex.cluster.v1.cluster_pb2_grpc import ClusterServiceStub
from loraplex.operator.scaler.policy import CellSums, Observation, Pool, divide
from loraplex.operator.scaler.settings import LOOK_S, ScalerSettings
from loraplex.runtime.rpc.errors import InvalidField, Unavailable
from loraplex.runtime.rpc.interceptors import Context
from loraplex.runtime.rpc.server import Server, stop_signal
from loraplex.runtime.rpc.shares import Shares
from loraplex.runtime.telemetry.logging import LogOnce
from loraplex.runtime.telemetry.metrics import Meters, serve_metrics
from loraplex.runtime.tenancy.certificates import end_of
from loraplex.runtime.tenancy.guard import Guard
from loraplex.runtime.tenancy.permissions import Port
from loraplex.scaler.v1 import externalscaler_pb2 as pb
from loraplex.scaler.v1 import externalscaler_pb2_grpc
from loraplex_client import LoraplexError
from loraplex_client.calls import Call, Script
from loraplex_client.connection import AsyncConnection

log = logging.getLogger(__name__)

# Maximum number of open StreamIsActive calls: an address alone gets half of them.
WATCHES = 1_024
# Timeout in seconds of a look at the cluster.
_ASK_S = 4.0
# Time in seconds after the last look that succeeded, from which on no number is given: KEDA then keeps the workers.
STALE_S = 30.0
# The metric's name, which KEDA makes part of the name that Kubernetes' autoscaler knows.
METRIC = "loraplex_desired_workers"
_SERVING = cluster_pb2.WORKER_PHASE_SERVING


class ScalerMetrics(Meters):
    """The metrics of one scaler."""

    def __init__(self) -> None:
        super().__init__()
        self.desired = self.gauge("desired_workers", "Workers that a model needs, in a cell.", ("model", "cell"))
        self.workers = self.gauge("scaler_workers", "Workers of a model that serve, at the last look.", ("model",))
        self.rate = self.gauge("scaler_worker_rate", "Measured work of a busy worker in a second.", ("model",))
        self.failed = self.counter("scaler_looks_failed", "Looks at the cluster that failed.")


class Scaler:
    """The pools, by model, and how many workers each wants since the last look."""

    def __init__(
        self, settings: ScalerSettings, metrics: ScalerMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pools = {model: Pool(rule) for model, rule in settings.rules().items()}
        self._bounds = settings.bounds()
        self._arrived, self._claimed = ({model: CellSums() for model in self._pools} for _ in range(2))
        self._metrics, self._clock = metrics, clock
        # By cell, whose name is empty for the pool of all cells.
        self._wanted: dict[str, dict[str, int]] = {}
        self._looked_at = -float("inf")
        # Set at each look, and then replaced.
        self._looked = asyncio.Event()

    def wanted(self, model: str, cell: str = "") -> int:
        """Return the workers that a model needs in a cell. Raises InvalidField for an unknown one, or Unavailable."""
        if model not in self._pools:
            named = f"{model!r} is not a model of this scaler" if model else "missing"
            raise InvalidField(
                "scalerMetadata.model",
                f"{named}: name one of {', '.join(sorted(self._pools))} in the trigger's metadata, "
                "or give the scaler the model with --pools",
            )
        if cell not in self._bounds[model]:
            named = f"{cell!r} is not a cell of {model}" if cell else "missing"
            cells = ", ".join(sorted(self._bounds[model])) or "none: --pools names no cell of it"
            raise InvalidField("scalerMetadata.cell", f"{named}: name one of {cells}")
        if self._clock() - self._looked_at > STALE_S:
            raise Unavailable("no router has told the state of the cluster yet, or for long")
        if model not in self._wanted:
            raise Unavailable(f"the routers do not serve {model}; register it: loraplex models push", reason="NO_MODEL")
        return self._wanted[model][cell]

    @property
    def why_not(self) -> str:
        """Return why no number can be given; empty: it can."""
        return "waits for a router" if self._clock() - self._looked_at > STALE_S else ""

    async def changed(self) -> None:
        """Wait for the next look."""
        await self._looked.wait()

    def observe(self, workers: cluster_pb2.ListWorkersResponse, queues: cluster_pb2.ListQueuesResponse) -> None:
        """Take a look at the cluster into account."""
        now = self._clock()
        for model in self._pools:
            if of_model := [queue for queue in queues.queues if queue.model == model]:
                serving = [one for one in workers.workers if one.model == model and one.phase == _SERVING]
                self._observe(model, serving, of_model, now)
        self._looked_at = now
        self._looked.set()
        self._looked = asyncio.Event()

    def _observe(
        self, model: str, serving: Sequence[cluster_pb2.Worker], queues: Sequence[cluster_pb2.Queue], now: float
    ) -> None:
        told = [queue for queue in queues if queue.state != cluster_pb2.CELL_STATE_AWAY]
        seen = Observation(
            now,
            len(serving),
            sum(worker.rows_running for worker in serving),
            sum(worker.rows_limit for worker in serving),
            sum(queue.waiting_work for queue in told),
            max((queue.oldest_wait for queue in told), default=0.0),
            self._arrived[model].add({queue.cell: queue.arrived_work for queue in told}),
            self._claimed[model].add({queue.cell: queue.claimed_work for queue in told}),
        )
        pool = self._pools[model]
        wanted = self._divide(model, pool.observe(seen), queues)
        if wanted != self._wanted.get(model):
            cells = "".join(f" in {cell}: {count};" for cell, count in wanted.items() if cell)
            log.info("%s: %d workers wanted,%s %d serve", model, sum(wanted.values()), cells, seen.workers)
        self._wanted[model] = wanted
        for cell, count in wanted.items():
            self._metrics.desired.labels(model, cell).set(count)
        self._metrics.workers.labels(model).set(seen.workers)
        self._metrics.rate.labels(model).set(pool.rate.value)

    def _divide(self, model: str, wanted: int, queues: Sequence[cluster_pb2.Queue]) -> dict[str, int]:
        """Divide a model's workers among open cells; drained cells get the minimum, unreachable ones keep theirs."""
        bounds, states = self._bounds[model], {queue.cell: queue.state for queue in queues}
        away = [cell for cell in bounds if states.get(cell) == cluster_pb2.CELL_STATE_AWAY]
        drained = [cell for cell in bounds if states.get(cell) == cluster_pb2.CELL_STATE_DRAINED]
        former = self._wanted.get(model, {})
        closed = {cell: former.get(cell, bounds[cell].least) for cell in away}
        closed |= {cell: bounds[cell].least for cell in drained}
        return closed | divide(wanted, {cell: of for cell, of in bounds.items() if cell not in closed})


class ExternalScaler(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Serves externalscaler.ExternalScaler to KEDA."""

    def __init__(self, scaler: Scaler, streams: int = WATCHES) -> None:
        self._scaler = scaler
        self._streams = Shares(streams)

    def _wanted(self, of: pb.ScaledObjectRef) -> int:
        return self._scaler.wanted(of.scalerMetadata.get("model", ""), of.scalerMetadata.get("cell", ""))

    async def IsActive(self, request: pb.ScaledObjectRef, context: Context) -> pb.IsActiveResponse:
        """Tell whether a model needs a worker."""
        return pb.IsActiveResponse(result=self._wanted(request) > 0)

    async def StreamIsActive(self, request: pb.ScaledObjectRef, context: Context) -> AsyncIterator[pb.IsActiveResponse]:
        """Tell whether a model needs a worker, whenever that changes. Raises Exhausted, since anybody may call it."""
        host, what = context.peer().rpartition(":")[0], "StreamIsActive calls of this process; call IsActive instead"
        told = None
        with self._streams.held(host, subject="scaler/streams", what=what, reason="SCALER_WATCHED"):
            while True:
                active = self._wanted(request) > 0
                if active != told:
                    yield pb.IsActiveResponse(result=active)
                    told = active
                await self._scaler.changed()

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Context) -> pb.GetMetricSpecResponse:
        """Return the metric, whose target 1 makes its value the number of workers."""
        self._wanted(request)
        return pb.GetMetricSpecResponse(
            metricSpecs=[pb.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)]
        )

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:
        """Return how many workers a model needs."""
        wanted = self._wanted(request.scaledObjectRef)
        value = pb.MetricValue(metricName=request.metricName or METRIC, metricValue=wanted, metricValueFloat=wanted)
        return pb.GetMetricsResponse(metricValues=[value])


def _look() -> Script[tuple[cluster_pb2.ListWorkersResponse, cluster_pb2.ListQueuesResponse]]:
    """Ask a router for the workers and the queues."""
    workers = yield Call("ListWorkers", cluster_pb2.ListWorkersRequest(), timeout_s=_ASK_S)
    queues = yield Call("ListQueues", cluster_pb2.ListQueuesRequest(), timeout_s=_ASK_S)
    return workers, queues


async def _follow(connection: AsyncConnection, scaler: Scaler, metrics: ScalerMetrics) -> None:
    """Look at the cluster every LOOK_S; never returns."""
    once = LogOnce(log, logging.WARNING)
    while True:
        try:
            scaler.observe(*await connection.run(_look()))
            once.reset()
        except LoraplexError as error:
            metrics.failed.inc()
            once(f"cannot look at the cluster: {error}")
        metrics.health.set(scaler.why_not)
        await asyncio.sleep(LOOK_S)


def new_server(scaler: Scaler) -> Server:
    """Return the server for KEDA, which sends no credential: whoever reaches it learns how many workers are wanted."""
    server = Server(Guard([Port.OPERATORS], []))
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(ExternalScaler(scaler), server.services)
    return server


async def run(settings: ScalerSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortInUse, MetricsPortError or InvalidRequestError before it serves."""
    stop, metrics = stop_signal(), ScalerMetrics()
    scaler, tls = Scaler(settings, metrics), settings.tls_files()
    connection = AsyncConnection(settings.router, ClusterServiceStub)
    metrics_server = serve_metrics(metrics, settings.host, settings.metrics_port)
    server = new_server(scaler)
    credentials = None if tls is None else tls.server_credentials(client_certificates=True)
    port = server.bind(settings.host, settings.port, credentials)
    if tls is not None:
        metrics.certificate_end.set_function(lambda: end_of(Path(settings.tls_cert).read_bytes()))
    await server.start()
    await server.set_serving(True)
    metrics.health.listens()
    print(f"ready scaler={settings.host}:{port}{metrics.ready_word}", flush=True)
    following = asyncio.create_task(_follow(connection, scaler, metrics))
    await asyncio.wait({following, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if following.done():
        following.result()
    metrics.health.stop()
    await server.stop(0)
    following.cancel()
    await connection.close()
    if metrics_server is not None:
        await asyncio.to_thread(metrics_server.close)
