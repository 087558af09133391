"""Whole clusters of real processes, and what their tests ask of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import pytest
from redis.asyncio import Redis

from loraplex.cli.local import ClusterSettings, LocalCluster
from loraplex.cli.models import registered
from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.broker.connection import connect
from loraplex_client import AsyncClient, AsyncStoreClient
from tests import loop_watch
from tests.broker.role_clients import refused
from tests.faulty_store import FaultyStore

TENANT = "acme"


@dataclass(frozen=True)
class Cluster:
    """A serving cluster; `digests` by adapter name, all of tenant acme."""

    local: LocalCluster
    client: AsyncClient
    redis: Redis
    digests: Mapping[str, str]

    async def workers(self) -> list[cluster_pb2.Worker]:
        """The live workers as ListWorkers tells."""
        async with grpc.aio.insecure_channel(self.local.router) as channel:
            answer = await cluster_pb2_grpc.ClusterServiceStub(channel).ListWorkers(cluster_pb2.ListWorkersRequest())
            return list(answer.workers)

    async def idle(self) -> bool:
        """Tell whether nothing is referenced, pinned, queued or running anywhere."""
        workers = await self.workers()
        held = [w.blocks.referenced + w.adapter_slots.pinned + w.rows_running + w.rows_waiting for w in workers]
        keys = [key for pattern in ("*:job:*", "*:waiting") async for key in self.redis.scan_iter(pattern)]
        return bool(workers) and not any(held) and not keys


@pytest.fixture(scope="session", autouse=True)
def _holds_of_loops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With HOLDS (`make holds`) let all processes measure how long they hold their event loops, and check it."""
    if "HOLDS" not in os.environ:
        yield
        return
    holds = tmp_path_factory.mktemp("holds")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in loop_watch.environ(holds, os.environ).items():
            patch.setenv(name, value)
        yield
    if long := loop_watch.long_holds(holds):
        pytest.fail(f"longer than {loop_watch.LIMIT_MS:g} ms:\n{long}", pytrace=False)


StartCluster = Callable[..., AbstractAsyncContextManager[Cluster]]


@asynccontextmanager
async def running_cluster(
    directory: Path,
    model: str,
    adapters: Mapping[str, Path],
    workers: int = 1,
    worker_flags: tuple[str, ...] = (),
    faulty: FaultyStore | None = None,
    routers: int = 1,
    redis_url: str = "",
    quantize: str = "",
    http: bool = False,
    kv_cache_dtype: str = "",
    router_flags: tuple[str, ...] = (),
    store_flags: tuple[str, ...] = (),
    launch: Callable[[ClusterSettings], LocalCluster] = LocalCluster,
) -> AsyncIterator[Cluster]:
    """A cluster in `directory`, whose client calls the first router. With `faulty` its workers see the store so.

    With `http` it has a gateway, which calls all routers.
    """
    if faulty is not None:
        worker_flags = ("--store", await faulty.start(), *worker_flags)
    settings = ClusterSettings(
        model,
        workers=workers,
        routers=routers,
        port=0,
        store_port=0,
        http_port=0 if http else None,
        redis_url=redis_url,
        data_dir=directory,
        worker_flags=(f"--quantize={quantize}", f"--kv-cache-dtype={kv_cache_dtype}", *worker_flags),
        router_flags=router_flags,
        store_flags=store_flags,
    )
    async with launch(settings) as local:
        if faulty is not None:
            faulty.target = local.store
        digests = {}
        async with AsyncStoreClient(local.store, TENANT) as store:
            base = await asyncio.to_thread(read_base_model, model, "", quantize, kv_cache_dtype)
            await store.register_model(registered(base), base.files)
            for name, files in adapters.items():
                digests[name] = (await store.push(files, name)).revision.digest
        await local.wait_serving(220)  # in a fresh clone an engine compiles its kernels first
        redis = await connect(local.redis_url)
        async with AsyncClient(local.router, TENANT) as client:
            yield Cluster(local, client, redis, digests)
        if not redis_url:  # the launcher's own Valkey, where each process has the user of its role
            assert await refused(redis) <= {("worker", "function|load")}
        await redis.aclose()
    if faulty is not None:
        await faulty.stop()


async def jobs(cluster: Cluster, routers: Sequence[str] = ()) -> list[cluster_pb2.Job]:
    """Return the jobs that these routers own; by default those of all."""
    found: list[cluster_pb2.Job] = []
    for address in routers or cluster.local.routers:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            found += (await stub.ListJobs(cluster_pb2.ListJobsRequest())).jobs
    return found


@pytest.fixture
def start_cluster(tmp_path: Path) -> StartCluster:
    """Starts a cluster: `start_cluster(model, adapters={name: directory}, workers=2, worker_flags=(...))`."""
    return partial(running_cluster, tmp_path / "cluster")


def write_hash_adapters(directory: Path) -> Mapping[str, Path]:
    """Three adapters that the hash model accepts: it takes any bytes."""
    directories = {}
    for name in ("a", "b", "c"):
        files = directories[name] = directory / name
        files.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
        (files / "adapter_config.json").write_text(json.dumps(config))
        (files / "adapter_model.safetensors").write_bytes(f"weights of {name}".encode())
    return directories


@pytest.fixture
def hash_adapters(tmp_path: Path) -> Mapping[str, Path]:
    """Three adapters that the hash model accepts: it takes any bytes."""
    return write_hash_adapters(tmp_path / "adapters")


@pytest.fixture
def eventually() -> Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]:
    """Waits until a condition of the cluster holds; workers report themselves twice a second."""

    async def wait(condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(100):
            while not await condition():  # noqa: ASYNC110 — the workers' own reports are the only event there is
                await asyncio.sleep(0.1)

    return wait
