"""Clusters of this machine that benchmarks measure."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from loraplex_client import AsyncStoreClient

from artifacts.base_model import read_base_model
from clients.cli.models import registered
from deploy.local.cluster import ClusterSettings, LocalCluster


@asynccontextmanager
async def serving_cluster(settings: ClusterSettings) -> AsyncIterator[LocalCluster]:
    """Run a cluster whose base model is registered; yields it once it serves."""
    async with LocalCluster(settings) as cluster:
        base = await asyncio.to_thread(read_base_model, settings.model)
        async with AsyncStoreClient(cluster.store) as store:
            await store.register_model(registered(base), base.files)
        await cluster.wait_serving()
        yield cluster


def process_ids(cluster: LocalCluster, rooms: Iterable[str]) -> dict[str, int]:
    """Return the processes of these rooms, and `client`, this one."""
    pids = {name.partition("-")[0]: process.pid for name, process in cluster.processes.items()}
    return {"client": os.getpid()} | {room: pids[room] for room in rooms}
