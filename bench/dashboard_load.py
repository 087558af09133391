"""The cluster of bench.dashboards and its load: every part of the dashboards has something to show."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench.local_cluster import serving_cluster
from loraplex.admin.v1.plans_pb2 import Plan
from loraplex.cli.local import ClusterSettings, LocalCluster
from loraplex.cli.upload_tree import find_adapters
from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex_client import AsyncStoreClient

_EXAMPLES = Path(__file__).parents[1] / "examples"
# Fewer slots than the examples have adapters, so that some are evicted; few rows, so that jobs wait.
_WORKER_FLAGS = ("--adapter-slots", "2", "--rows", "6")
# A tenant of the load test sends more than this.
_PLAN = Plan(name="tenants/globex", requests_per_minute=20)
# Parts of the run after which a worker's engine is killed.
_KILLS = (0.4, 0.7)


@dataclass(frozen=True)
class LoadedCluster:
    """A cluster that serves; `targets` are the addresses of its processes' metrics, by their names."""

    cluster: LocalCluster
    targets: Mapping[str, str]
    seconds: float
    directory: Path

    async def run(self) -> None:
        """Send requests over gRPC and HTTP, and kill engines meanwhile. Raises RuntimeError where a load test fails."""
        mixed = [str(_EXAMPLES / "loadtest" / "tenants.toml"), "--router", ",".join(self.cluster.routers)]
        chat = [
            "--url",
            f"http://{self.cluster.http}",
            "--api",
            "openai",
            "--tenant",
            "acme",
            "-a",
            "shout",
            "-a",
            "nobody",
        ]
        chat += ["--concurrency", "2", "--prompt-tokens", "40", "--answer-tokens", "30"]
        await asyncio.gather(self._load_test("grpc", mixed), self._load_test("http", chat), self._kill_engines())

    async def _load_test(self, name: str, flags: list[str]) -> None:
        command = ["-m", "loraplex.cli", "loadtest", *flags, "--duration", f"{self.seconds:g}"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, "--out", str(self.directory / name),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, stderr = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"load test over {name}: {stderr.decode()}")

    async def _kill_engines(self) -> None:
        passed = 0.0
        async with grpc.aio.insecure_channel(self.cluster.router) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            for number, part in enumerate(_KILLS):
                await asyncio.sleep((part - passed) * self.seconds)
                passed = part
                workers = (await stub.ListWorkers(cluster_pb2.ListWorkersRequest())).workers
                os.kill(sorted(worker.engine_pid for worker in workers)[number % len(workers)], signal.SIGKILL)


@asynccontextmanager
async def loaded_cluster(directory: Path, seconds: float) -> AsyncIterator[LoadedCluster]:
    """Run two routers, two workers and a gateway with the example's model and adapters."""
    settings = ClusterSettings(
        str(_EXAMPLES / "model"),
        workers=2,
        routers=2,
        port=0,
        store_port=0,
        http_port=0,
        worker_flags=_WORKER_FLAGS,
    )
    async with serving_cluster(settings, _PLAN) as cluster:
        for adapter in find_adapters(_EXAMPLES / "adapters").adapters:
            async with AsyncStoreClient(cluster.store, adapter.tenant) as store:
                await store.push(adapter.directory, adapter.name)
        words = {name: await process.wait_ready() for name, process in cluster.processes.items()}
        targets = {name: word["metrics"] for name, word in words.items() if "metrics" in word}
        yield LoadedCluster(cluster, targets, seconds, directory)
