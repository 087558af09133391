"""Kill -9 of the worker that requests run at."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable

from loraplex.cluster.v1 import cluster_pb2
from tests.e2e.conftest import Cluster, jobs


async def matching(
    cluster: Cluster, condition: Callable[[cluster_pb2.Job], object], count: int
) -> list[cluster_pb2.Job]:
    """Wait until a condition holds for so many requests, and return them.

    Asks the routers: clients read streams more slowly than they come.
    """
    async with asyncio.timeout(60):
        while True:
            found = [job for job in await jobs(cluster) if condition(job)]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.01)


async def running(cluster: Cluster, count: int) -> list[cluster_pb2.Job]:
    """Wait until so many requests have tokens, and return them."""
    return await matching(cluster, lambda job: job.completion_tokens, count)


async def router_of_moved(cluster: Cluster) -> str:
    """Wait until a request that lost its worker runs at another, and return its router's process."""
    async with asyncio.timeout(60):
        while True:
            for number, address in enumerate(cluster.local.routers, 1):
                if any(job.attempt > 1 and job.worker_id for job in await jobs(cluster, [address])):
                    return f"router-{number}"
            await asyncio.sleep(0.01)


async def kill_busiest_worker(cluster: Cluster) -> None:
    """Kill a worker that requests run at, with its engine, and start another."""
    ((busiest, _),) = Counter(job.worker_id for job in await running(cluster, 4)).most_common(1)
    (pid,) = [worker.pid for worker in await cluster.workers() if worker.worker_id == busiest]
    (name,) = [name for name, process in cluster.local.processes.items() if process.pid == pid]
    cluster.local.kill(name, signal.SIGKILL, group=True)
    await cluster.local.start_worker()
