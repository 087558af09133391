"""Lets the scaler size the chart's workers under a load in steps: `python -m tests.deploy.scaling_rehearsal`.

The second part of `make rehearsal`: a loop does what KEDA and Kubernetes' autoscaler do, and every answer is compared.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from loraplex.scaler.v1 import externalscaler_pb2 as pb
from loraplex.scaler.v1.externalscaler_pb2_grpc import ExternalScalerStub
from tests.deploy.kubernetes_tools import render
from tests.deploy.pods import Cluster
from tests.deploy.rehearsal import Streams

# Time in seconds for which a step of the load lasts at least, and interval of looks at a load that pauses.
_STEP_S, _LOOK_S = 20.0, 0.1
# Seconds of a token, and rows of a worker, in the rehearsal of the scaler: a worker answers some two requests a second.
_SLOW = ("models.base.hash=hash:?vocab=32000&step_ms=25&seed=1&end_after=0", "workers.cpu.args={--rows=2}")
_POOL = "lx-worker-cpu"


async def follow_scaler(cluster: Cluster) -> None:
    """Do what KEDA and Kubernetes' autoscaler do: ask for the wanted workers, and set their number; never returns.

    Where the scaler has no number yet the workers stay as they are.
    """
    of = pb.ScaledObjectRef(name=_POOL, scalerMetadata={"model": "base"})
    async with grpc.aio.insecure_channel(f"{cluster.address_of('lx-scaler')}:50055") as channel:
        stub: Any = ExternalScalerStub(channel)
        while True:
            try:
                spec = (await stub.GetMetricSpec(of)).metricSpecs[0]
                request = pb.GetMetricsRequest(scaledObjectRef=of, metricName=spec.metricName)
                (value,) = (await stub.GetMetrics(request)).metricValues
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            else:
                replicas = math.ceil(value.metricValueFloat / spec.targetSizeFloat)
                if replicas != len(cluster.pods[_POOL]):
                    await cluster.scale(_POOL, replicas)
            await asyncio.sleep(1.0)


class PacedRequests:
    """Requests at a rate that the caller sets; they do not wait for each other's answers."""

    def __init__(self, load: Streams) -> None:
        self._load, self.rate = load, 0.0
        self._open: set[asyncio.Task[None]] = set()
        self._sent = 0

    async def run(self) -> None:
        """Send requests; never returns. Raises what one of them got."""
        while True:
            if self.rate:
                self._sent += 1
                self._open.add(asyncio.create_task(self._load.ask(f"paced {self._sent}")))
            done = {task for task in self._open if task.done()}
            self._open -= done
            for task in done:
                task.result()
            await asyncio.sleep(1 / self.rate if self.rate else _LOOK_S)

    async def end(self) -> int:
        """Wait for the last answers; return how many requests there were. Raises what one of them got."""
        self.rate = 0.0
        await asyncio.gather(*self._open)
        return self._sent


async def rehearse_scaling(directory: Path, say: Callable[[str], None]) -> None:
    """Let the scaler size the workers under a load in steps, to none and back. Raises on any fault."""
    sizes = ("scaler.enabled=true", "workers.cpu.scaled=true", "workers.cpu.minReplicas=0", "workers.cpu.maxReplicas=6")
    cluster = Cluster(directory)
    try:
        await cluster.apply(render("laptop", (*sizes, *_SLOW, "scaler.idleSeconds=20")))
        load = Streams(cluster.routers, 0)
        paced = PacedRequests(load)
        async with asyncio.TaskGroup() as tasks:
            endless = [tasks.create_task(paced.run()), tasks.create_task(follow_scaler(cluster))]
            for rate, workers in ((1.0, 1), (9.5, 6), (2.8, 2)):
                paced.rate = rate
                await asyncio.sleep(_STEP_S)
                await cluster.until_pods(_POOL, workers)
                say(f"{rate:g} requests a second: the scaler has {workers} workers; {load.answers} answers, 0 failed")
            sent = await paced.end()
            await cluster.until_pods(_POOL, 0)
            say(f"no requests: no workers; {sent} requests had {load.answers} answers")
            await load.ask("the first one after a pause")
            await cluster.until_pods(_POOL, 1)
            say("one request: it waited for the worker that the scaler started, and has its answer")
            assert load.answers == sent + 1
            for task in endless:
                task.cancel()
        assert {code for _, code in cluster.ended} == {0}, cluster.ended
    finally:
        await cluster.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="lx-") as directory:
        asyncio.run(rehearse_scaling(Path(directory), lambda line: print(line, flush=True)))
