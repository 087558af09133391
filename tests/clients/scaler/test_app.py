"""The scaler's port for KEDA: numbers, statuses that say what to do, and TLS for its certificate alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraplex.cli.development_ca import DevelopmentCa
from loraplex.cluster.v1 import cluster_pb2
from loraplex.operator.scaler.app import STALE_S, WATCHES, Scaler, ScalerMetrics, new_server
from loraplex.operator.scaler.settings import ScalerSettings
from loraplex.runtime.rpc.errors import InvalidField
from loraplex.scaler.v1 import externalscaler_pb2 as pb
from loraplex.scaler.v1.externalscaler_pb2_grpc import ExternalScalerStub


class Seen:
    """A scaler that is shown a cluster, at a time that the test sets."""

    def __init__(self, pools: str = "base=0-8,other=1-2") -> None:
        self.now_s = 1_000.0
        self.metrics = ScalerMetrics()
        self.scaler = Scaler(ScalerSettings(pools=pools, idle_s=60.0), self.metrics, lambda: self.now_s)

    def look(self, *, workers: int, waiting_work: int = 0) -> None:
        """Show the workers of the model `base`, and one of its workers that drains."""
        phases = cluster_pb2.WorkerPhase
        listed = [
            cluster_pb2.Worker(model="base", phase=phases.WORKER_PHASE_SERVING, rows_limit=8) for _ in range(workers)
        ]
        listed.append(
            cluster_pb2.Worker(model="base", phase=phases.WORKER_PHASE_DRAINING, rows_running=8, rows_limit=8)
        )
        queue = cluster_pb2.Queue(model="base", waiting_work=waiting_work, arrived_work=waiting_work)
        self.scaler.observe(
            cluster_pb2.ListWorkersResponse(workers=listed),
            cluster_pb2.ListQueuesResponse(queues=[queue, cluster_pb2.Queue(model="unscaled")]),
        )


@asynccontextmanager
async def serving(seen: Seen, **tls: Any) -> AsyncIterator[str]:
    settings = ScalerSettings(pools="base=0-8", **tls)
    server = new_server(seen.scaler)
    files = settings.tls_files()
    port = server.bind("127.0.0.1", 0, None if files is None else files.server_credentials(client_certificates=True))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def of(model: str) -> pb.ScaledObjectRef:
    return pb.ScaledObjectRef(name="llm-worker-cpu", namespace="llm", scalerMetadata={"model": model} if model else {})


async def metric(stub: Any, model: str) -> Any:
    spec = (await stub.GetMetricSpec(of(model))).metricSpecs[0]
    assert (spec.targetSize, spec.targetSizeFloat) == (1, 1.0)
    answer = await stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=of(model), metricName=spec.metricName))
    (value,) = answer.metricValues
    assert value.metricName == spec.metricName
    assert value.metricValueFloat == value.metricValue
    return value


async def test_streams_of_an_address_have_a_bound_and_other_calls_have_none() -> None:
    seen = Seen()
    seen.look(workers=0)
    async with serving(seen) as address:
        open_, refused = list[Any](), 0
        async with (
            grpc.aio.insecure_channel(address) as loud,
            grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as second,
        ):
            for channel in (loud, second):
                calls: list[Any] = [ExternalScalerStub(channel).StreamIsActive(of("base")) for _ in range(WATCHES // 2)]
                firsts = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
                refused += sum(isinstance(first, grpc.aio.AioRpcError) for first in firsts)
                open_ += calls
            assert refused == WATCHES // 2
            stub: Any = ExternalScalerStub(loud)
            assert not (await stub.IsActive(of("base"))).result
            for call in open_:
                call.cancel()


async def test_keda_gets_the_wanted_workers_and_so_does_prometheus() -> None:
    seen = Seen()
    async with serving(seen) as address, grpc.aio.insecure_channel(address) as channel:
        stub: Any = ExternalScalerStub(channel)
        seen.look(workers=0)
        assert (await metric(stub, "base")).metricValue == 0
        active = stub.StreamIsActive(of("base"))
        assert not (await active.read()).result
        assert not (await stub.IsActive(of("base"))).result
        seen.look(workers=0, waiting_work=100_000)
        assert (await active.read()).result
        assert (await stub.IsActive(of("base"))).result
        assert (await metric(stub, "base")).metricValue == 8
        assert seen.metrics.registry.get_sample_value("loraplex_desired_workers", {"model": "base", "cell": ""}) == 8
        assert seen.metrics.registry.get_sample_value("loraplex_scaler_workers", {"model": "base"}) == 0
        active.cancel()


@pytest.mark.parametrize(
    ("model", "age_s", "code", "message"),
    [
        (
            "nosuch",
            0.0,
            "INVALID_ARGUMENT",
            "'nosuch' is not a model of this scaler: name one of base, other in the trigger",
        ),
        ("", 0.0, "INVALID_ARGUMENT", "scalerMetadata.model: missing: name one of base, other"),
        ("other", 0.0, "UNAVAILABLE", "the routers do not serve other; register it: loraplex models push"),
        ("base", STALE_S + 1, "UNAVAILABLE", "no router has told the state of the cluster"),
    ],
)
async def test_a_metric_that_there_is_not_says_what_to_do(model: str, age_s: float, code: str, message: str) -> None:
    seen = Seen()
    async with serving(seen) as address, grpc.aio.insecure_channel(address) as channel:
        stub: Any = ExternalScalerStub(channel)
        seen.look(workers=1)
        seen.now_s += age_s
        for call in (
            stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=of(model))),
            stub.GetMetricSpec(of(model)),
            stub.IsActive(of(model)),
            stub.StreamIsActive(of(model)).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code().name == code
            assert message in str(caught.value.details())


async def test_with_tls_only_a_certificate_of_the_authority_gets_an_answer(tmp_path: Path) -> None:
    ca, seen = DevelopmentCa(), Seen()
    seen.look(workers=1)
    cert, key = ca.write(tmp_path, "scaler", ca.issue("loraplex://router/scaler", ["127.0.0.1"]))
    files = {"tls_cert": str(cert), "tls_key": str(key), "tls_ca": str(ca.write_ca(tmp_path))}
    keda_cert, keda_key = ca.issue("https://keda", ["keda.example"])
    async with serving(seen, **files) as address:
        known = grpc.ssl_channel_credentials(ca.pem, keda_key, keda_cert)
        async with grpc.aio.secure_channel(address, known) as channel:
            assert (await metric(ExternalScalerStub(channel), "base")).metricValue == 1
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca.pem)) as channel:
            stub: Any = ExternalScalerStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.IsActive(of("base"))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pools": "base"}, "--pools 'base': write MODEL=MIN-MAX, such as base=1-8"),
        ({"pools": "base=3-2"}, "--pools base=3-2: the maximum must be at least 1 and the minimum"),
        ({"pools": "base=0-0"}, "--pools base=0-0: the maximum must"),
        ({"pools": "base=0-1,base=0-2"}, "base is named twice"),
        ({"pools": "base=0-1", "wait_s": 0.0}, "--wait-s 0.0: more than 0"),
        ({"pools": "base=0-1", "idle_s": float("nan")}, "--idle-s nan"),
        ({"pools": "base=0-1", "worker_rate": float("inf")}, "--worker-rate inf: not a finite number"),
        ({"pools": "base=0-1", "port": 70_000}, "--port 70000: not a port"),
        ({"pools": "base=0-1", "tls_cert": "a.pem"}, "--tls-cert, --tls-key, --tls-ca: give all three"),
    ],
)
def test_settings_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScalerSettings(**values)


def looked_at_cells(seen: Seen, **cells: tuple[int, int, int]) -> dict[str, int]:
    """Show cells, each with its workers, its work that waits and its state; return the workers that each wants."""
    workers = [
        cluster_pb2.Worker(model="base", phase=cluster_pb2.WorkerPhase.WORKER_PHASE_SERVING, rows_limit=8, cell=name)
        for name, (count, _, _) in cells.items()
        for _ in range(count)
    ]
    queues = [
        cluster_pb2.Queue(model="base", cell=name, waiting_work=work, arrived_work=work, state=state)  # type: ignore[arg-type]  # its number
        for name, (_, work, state) in cells.items()
    ]
    seen.scaler.observe(cluster_pb2.ListWorkersResponse(workers=workers), cluster_pb2.ListQueuesResponse(queues=queues))
    return {name: seen.scaler.wanted("base", name) for name in cells}


def test_pools_of_cells_share_the_workers_of_a_model() -> None:
    opened, drained, away = cluster_pb2.CELL_STATE_OPEN, cluster_pb2.CELL_STATE_DRAINED, cluster_pb2.CELL_STATE_AWAY
    seen = Seen(pools="base@main=1-4,base@second=1-12")
    assert looked_at_cells(seen, main=(1, 0, opened), second=(3, 0, opened)) == {"main": 1, "second": 3}
    wanted = looked_at_cells(seen, main=(1, 0, opened), second=(3, 1_000_000, opened))
    assert wanted == {"main": 4, "second": 12}, "what waits in one cell is of both"
    assert seen.metrics.registry.get_sample_value("loraplex_desired_workers", {"model": "base", "cell": "main"}) == 4
    wanted = looked_at_cells(seen, main=(4, 0, opened), second=(0, 0, away))
    assert wanted == {"main": 4, "second": 12}, "a Redis that restarts ends no workers"
    assert looked_at_cells(seen, main=(4, 0, opened), second=(12, 0, drained)) == {"main": 4, "second": 1}
    with pytest.raises(InvalidField, match="'third' is not a cell of base: name one of main, second"):
        seen.scaler.wanted("base", "third")
    with pytest.raises(InvalidField, match="missing: name one of main, second"):
        seen.scaler.wanted("base")


@pytest.mark.parametrize(
    ("pools", "why"),
    [
        ("base@main=1-4,base@main=1-4", "base@main is named twice"),
        ("base@main=1-4,base=1-4", "name the cell in each pool of base, or in none"),
        ("base@=1-4", "write MODEL=MIN-MAX, such as base=1-8, or MODEL@CELL=MIN-MAX"),
    ],
)
def test_pools_that_contradict_each_other_are_refused(pools: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        ScalerSettings(pools=pools)
