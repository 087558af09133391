"""Clusters of this machine that benchmarks measure, and what they need beside them."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from loraplex.admin.v1 import plans_pb2_grpc
from loraplex.admin.v1.plans_pb2 import Plan, SetPlanRequest
from loraplex.cli.local import ClusterSettings, LocalCluster
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.runtime.rpc.children.process import Process
from loraplex_client import AsyncStoreClient

# Seconds that a program of others gets to end by itself.
_STOP_S = 20.0


@asynccontextmanager
async def serving_cluster(settings: ClusterSettings, *plans: Plan, quantize: str = "") -> AsyncIterator[LocalCluster]:
    """Run a cluster whose base model is registered in a scheme, with plans; yields it once it serves."""
    async with LocalCluster(settings) as cluster:
        base = await asyncio.to_thread(read_base_model, settings.model, quantize=quantize)
        async with AsyncStoreClient(cluster.store) as store:
            await store.register_model(registered(base), base.files)
        async with grpc.aio.insecure_channel(cluster.store) as channel:
            await set_plans(channel, *plans)
        await cluster.wait_serving()
        yield cluster


async def set_plans(channel: grpc.aio.Channel, *plans: Plan, **call: Any) -> None:
    """Set plans at a store."""
    stub: plans_pb2_grpc.PlanServiceAsyncStub = plans_pb2_grpc.PlanServiceStub(channel)
    for plan in plans:
        await stub.SetPlan(SetPlanRequest(plan=plan), **call)


@asynccontextmanager
async def running(
    name: str, argv: Sequence[str], ready: str, log_path: Path, environ: Mapping[str, str] | None = None
) -> AsyncIterator[None]:
    """Run a program of others while the context is open, from its line with `ready` on. Raises LaunchError."""
    # Lines are looked at on stdout, and some programs print them on stderr.
    both = ("sh", "-c", 'exec "$@" 2>&1', "sh", *argv)
    process = await Process.start(name, both, log_path=log_path, environ=environ, ready=re.compile(re.escape(ready)))
    try:
        await process.started()
        yield
    finally:
        await process.stop(_STOP_S)


def free_port() -> int:
    """Return a port of loopback that nothing listens on, for a program that cannot choose one itself."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def process_ids(cluster: LocalCluster, rooms: Iterable[str]) -> dict[str, int]:
    """Return the processes of these rooms, and `client`, this one."""
    pids = {name.partition("-")[0]: process.pid for name, process in cluster.processes.items()}
    return {"client": os.getpid()} | {room: pids[room] for room in rooms}
