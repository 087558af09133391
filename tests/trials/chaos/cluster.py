"""The cluster under chaos: every process of it reaches the others over links of its own.

router-N ─ redis link ─▶ Valkey ◀─ redis link ─ worker-N         clients ─ client link ─▶ router-N
                             worker-N ─ grpc link ─▶ relays of the routers, the store
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from redis.asyncio import Redis

from loraplex.cli.local import ClusterSettings, LocalCluster
from loraplex.cli.models import registered
from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex_client import AsyncStoreClient
from tests.faulty_store import FaultyStore
from tests.plans_file import set_plans
from tests.trials.chaos.history import Left, Revision
from tests.trials.chaos.links import Link
from tests.trials.chaos.oracle import ACTIVATED, INVOCATION
from tests.trials.chaos.plan import ADAPTERS, MODEL, MODEL_NAME, TENANTS
from tests.trials.chaos.valkeys import Valkeys

ROUTERS = 2
WORKERS = 4
# So long a router has to tell what it knows.
ASK_S = 5.0
# Timeout in seconds for the first router to list a new worker: other faults may stop it, or keep it from Redis.
LISTED_S = 60.0
# Few rows: every worker has work. The bytes of an adapter have to come while a store fault lasts.
_WORKER_FLAGS = ("--rows", "12", "--fetch-silent-s", "5", "--drain-s", "0.5")
# A queue that a crowd fills in a moment, and a router that soon drops a client that does not read.
WAITING, CLIENT_STALL_S = 80, 5.0
_ROUTER_FLAGS = (*("--waiting-limit", str(WAITING), "--client-stall-s", str(CLIENT_STALL_S), "--drain-s", "0.5"),)
# Keys of a cell that are there without any job, by the word after the tag; the others must go, or expire.
_OF_QUEUE = {"arrivals", "news", "floor", "idle", "totals", "rooms", "wake", "dead", "commands"}
_LASTING = {"born", "routers", "workers", "worker", "cards", *_OF_QUEUE} | {
    *("arrived_work", "claimed_work"),  # sums since the queue began
    *("demand", "homes"),  # of adapters
    "keys",  # of resume tokens
    *("state", "usage"),  # of the ledger
}


@dataclass(frozen=True)
class Links:
    """The ways of one process to the others."""

    redis: Link
    grpc: Link


class ChaosCluster(LocalCluster):
    """A LocalCluster whose routers and workers are spawned behind links; `links` by process, `doors` by router."""

    def __init__(self, settings: ClusterSettings, valkeys: Valkeys, store: FaultyStore, *, has_plans: bool) -> None:
        super().__init__(settings)
        self._has_plans = has_plans
        self.valkeys = valkeys
        self.faulty_store = store
        self.links: dict[str, Links] = {}
        self.doors: dict[str, Link] = {}

    async def _spawn(self, name: str, argv: list[str], environ: dict[str, str] | None = None) -> None:
        room = name.partition("-")[0]
        if environ is not None and room in {"router", "worker"}:
            links = self.links.get(name)
            if links is None:
                links = self.links[name] = Links(
                    await Link(self.valkeys.primary.socket).start(), await Link(None).start()
                )
                self.valkeys.clients.append(links.redis)
            dropped = {"no_proxy", "NO_PROXY", "no_grpc_proxy"}
            environ = {key: value for key, value in environ.items() if key not in dropped}
            environ[f"LORAPLEX_{room.upper()}_REDIS_URL"] = f"redis://{links.redis.address}"
            environ["grpc_proxy"] = f"http://{links.grpc.address}"
            if room == "worker":
                argv = [*argv, "--worker-id", name]
            elif self._has_plans and "--usage-file" not in argv:
                argv = [*argv, "--usage-file", str(self.usage_file(name))]
        await super()._spawn(name, argv, environ)

    def usage_file(self, router: str) -> Path:
        """Return the usage file of a router, which it writes where tenants have plans."""
        return self.data_dir / f"{router}.jsonl"

    def _may_replace(self) -> bool:
        """A worker that dies of itself is a finding, and ends the run."""
        return False

    async def open_doors(self) -> None:
        """The links that clients come by; once the routers listen."""
        for number, address in enumerate(self.routers, start=1):
            self.doors[f"router-{number}"] = await Link(address).start()

    async def close_links(self) -> None:
        """Close every link."""
        links = [link for pair in self.links.values() for link in (pair.redis, pair.grpc)]
        await asyncio.gather(*(link.stop() for link in (*links, *self.doors.values())))

    def running_workers(self) -> list[str]:
        """Names of the workers that were started and not killed."""
        return [process.name for process in self._workers()]

    async def workers(self) -> dict[str, cluster_pb2.Worker]:
        """Return the workers that a router lists, by name."""
        return await list_workers(self.routers[0])

    async def jobs(self) -> list[cluster_pb2.Job]:
        """The jobs of all routers that answer."""
        answers = await asyncio.gather(*(self._jobs(address) for address in self.routers))
        return [job for answer in answers for job in answer]

    async def _jobs(self, address: str) -> list[cluster_pb2.Job]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            try:
                return list((await stub.ListJobs(cluster_pb2.ListJobsRequest(), timeout=ASK_S)).jobs)
            except grpc.aio.AioRpcError:  # it was killed
                return []

    async def push(self, tenant: str, name: str) -> Revision:
        """Put an adapter into the store."""
        return await push_adapter(self.store, self.data_dir / "pushed", tenant, name)

    async def start_worker_of(self, model: str, name: str, worker_id: str) -> None:
        """Start a worker of another model, registered as `name`; returns when the first router lists it."""
        flags = ["--model", model, "--model-name", name, "--cache-dir", str(self.data_dir / "cache" / worker_id)]
        await self._spawn_service(worker_id, [*flags, "--store", self.store, *self.settings.worker_flags])
        await self.unless_failed(self.processes[worker_id].wait_ready())
        async with asyncio.timeout(LISTED_S):
            while not await self._lists(worker_id):  # noqa: ASYNC110 — another process's state has no event
                await asyncio.sleep(0.05)

    async def _lists(self, worker_id: str) -> bool:
        """Tell whether the first router lists a worker; another fault may keep it from answering."""
        try:
            return worker_id in await self.workers()
        except grpc.aio.AioRpcError as error:
            if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                raise
            return False

    async def left(self) -> Left:
        """Return what is held now."""
        return await what_is_left((await self.workers()).values(), self.valkeys.primary.client)


async def push_adapter(store: str, directory: Path, tenant: str, name: str) -> Revision:
    """Put an adapter into the store at this address; the hash model takes any bytes."""
    files = directory / tenant / name
    files.mkdir(parents=True)
    config: dict[str, object] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    if name == ACTIVATED:
        config["alora_invocation_tokens"] = list(INVOCATION.encode())
    (files / "adapter_config.json").write_text(json.dumps(config))
    (files / "adapter_model.safetensors").write_bytes(f"weights of {tenant} {name}".encode())
    async with AsyncStoreClient(store, tenant) as client:
        return Revision(tenant, name, (await client.push(files, name, base_model=MODEL_NAME)).revision.digest)


async def register_model(store: str, model: str = MODEL, name: str = MODEL_NAME) -> None:
    """Register a model at the store at this address, in place of what has its name."""
    async with AsyncStoreClient(store, TENANTS[0]) as client:
        base = read_base_model(model, name)
        await client.register_model(registered(base), base.files, replace=True)


async def what_is_left(workers: Iterable[cluster_pb2.Worker], redis: Redis) -> Left:
    """Return what these workers and Redis hold; without requests that is nothing."""
    keys: list[str] = []
    async for key in redis.scan_iter("lp:*"):
        word = key.decode().partition("}:")[2].partition(":")[0]
        of_tenants = word == "totals" and set(await redis.hkeys(key)) - {b"/cell"}
        if of_tenants or (word not in _LASTING and await redis.ttl(key) == -1):
            keys.append(key.decode())
    states = tuple(workers)
    return Left(
        blocks=sum(worker.blocks.referenced for worker in states),
        pins=sum(worker.adapter_slots.pinned + worker.rows_running + worker.rows_waiting for worker in states),
        redis_keys=sorted(keys),
    )


async def list_workers(router: str) -> dict[str, cluster_pb2.Worker]:
    """The live workers that the router at this address lists, by name."""
    async with grpc.aio.insecure_channel(router) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        answer = await stub.ListWorkers(cluster_pb2.ListWorkersRequest(), timeout=ASK_S)
        return {worker.worker_id: worker for worker in answer.workers}


@asynccontextmanager
async def chaos_cluster(directory: Path, plans: str = "") -> AsyncIterator[tuple[ChaosCluster, list[Revision]]]:
    """The cluster, serving, and what its tenants may ask for: three adapters each, and the base model."""
    await asyncio.to_thread(directory.mkdir, exist_ok=True)
    async with _faulty_store() as (store, store_address), Valkeys() as valkeys:
        settings = ClusterSettings(
            MODEL,
            workers=WORKERS,
            routers=ROUTERS,
            port=0,
            store_port=0,
            data_dir=directory,
            redis_url=f"unix://{valkeys.primary.socket}",
            worker_flags=("--store", store_address, *_WORKER_FLAGS),
            router_flags=_ROUTER_FLAGS,
        )
        cluster = ChaosCluster(settings, valkeys, store, has_plans=bool(plans))
        try:
            async with cluster:
                store.target = cluster.store
                await cluster.open_doors()
                await register_model(cluster.store)
                await set_plans(cluster.store, plans)
                revisions = [await cluster.push(tenant, name) for tenant in TENANTS for name in ADAPTERS]
                await cluster.wait_serving()
                yield cluster, [*revisions, Revision(TENANTS[0])]
        finally:
            await cluster.close_links()


@asynccontextmanager
async def _faulty_store() -> AsyncIterator[tuple[FaultyStore, str]]:
    store = FaultyStore()
    try:
        yield store, await store.start()
    finally:
        await store.stop()
