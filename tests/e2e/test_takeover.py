"""A worker that joins loads the adapters that it will be a home of, before requests with them come to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from loraplex.cluster.v1 import cluster_pb2

from broker.homes import Roster, WorkerLoad
from tests.e2e.conftest import Cluster, StartCluster

# So many that with any names of two workers the second one is a home of some.
ADAPTERS = 12
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]


async def ask(cluster: Cluster) -> list[cluster_pb2.Worker]:
    """Ask with each adapter; return the workers."""
    for name in cluster.digests:
        await cluster.client.generate("x", adapter_id=name, max_tokens=2)
    return await cluster.workers()


async def test_a_new_worker_takes_adapters_over(
    start_cluster: StartCluster, hash_adapters: Mapping[str, Path], eventually: Eventually
) -> None:
    config, adapters = (hash_adapters["a"] / "adapter_config.json").read_text(), {}
    for number in range(ADAPTERS):
        files = adapters[f"n{number}"] = hash_adapters["a"].parent / f"n{number}"
        files.mkdir()
        (files / "adapter_config.json").write_text(config)
        (files / "adapter_model.safetensors").write_bytes(f"weights of {number}".encode())
    async with start_cluster("hash:?vocab=32000&seed=1", adapters, worker_flags=("--rows", "8")) as cluster:
        (first,) = await ask(cluster)
        await cluster.local.start_worker()
        moved: set[str] = set()

        async def takes_over() -> bool:
            loads = [WorkerLoad(worker.worker_id, 0, 8) for worker in await ask(cluster)]
            homes = {digest: Roster(loads).preferred(digest).workers[0] for digest in cluster.digests.values()}
            moved.update(digest for digest, home in homes.items() if home != first.worker_id)
            new = await new_worker()
            return bool(moved) and moved <= {*new.adapters} and new.adapter_tiers.hits >= len(moved)

        async def new_worker() -> cluster_pb2.Worker:
            return next((one for one in await cluster.workers() if one.worker_id != first.worker_id), first)

        await eventually(takes_over)
        assert (await new_worker()).adapter_tiers.misses < len(moved), "a router has had it load them"
