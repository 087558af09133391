"""A store, a router, a worker and Valkey with credentials on, and the eyes of who looks for what they accepted."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis

from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.broker.keys import Keys
from loraplex.runtime.rpc.children.process import Process
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex_client import AsyncClient, AsyncStoreClient, Tls
from tests.credentials_files import job_keys, tls_files, write_tls_files
from tests.valkey_server import ValkeyServer

MODEL = "hash:?vocab=600&step_ms=1"
TENANT, OTHER = "acme", "globex"
KEYS = Keys("hash", "main")
PROCESSES = ("store", "router", "worker")
_TIMEOUT_S = 100.0


@dataclass
class Cluster:
    """The running cluster. `ports` are addresses by process and port."""

    directory: Path
    redis: Redis
    ports: dict[str, Mapping[str, str]]
    relay: str = ""

    def tls(self, uri: str) -> TlsFiles:
        """Return files of a certificate of the cluster's authority."""
        return tls_files(self.directory, uri)

    def client_tls(self, uri: str) -> Tls:
        """Return files of such a certificate for the SDK."""
        cert, key, ca = write_tls_files(self.directory, uri)
        return Tls(ca, cert, key)

    def client(self, tenant: str) -> AsyncClient:
        """Return a tenant's client of the router."""
        return AsyncClient(self.ports["router"]["mtls"], tls=self.client_tls(f"loraplex://tenant-admin/{tenant}"))

    async def worker_counts(self) -> tuple[int, int]:
        """Return how many tokens the worker has computed, and how many entries of Redis it has refused."""
        text = await asyncio.to_thread(_read, f"http://{self.ports['worker']['metrics']}/metrics")
        refused = re.findall(r"^loraplex_seals_refused_total\{.*\} (\S+)$", text, re.MULTILINE)
        computed = re.findall(r"^loraplex_engine_computed_tokens_total (\S+)$", text, re.MULTILINE)
        return int(float(computed[0])), round(sum(map(float, refused)))

    async def until_refused(self, count: int) -> None:
        """Wait until the worker has refused so many entries."""
        async with asyncio.timeout(_TIMEOUT_S):
            while (await self.worker_counts())[1] < count:  # noqa: ASYNC110  # a process of its own counts
                await asyncio.sleep(0.005)


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:  # of this test's own process
        return str(answer.read().decode())


def audited(directory: Path) -> dict[str, int]:
    """Return how many refusals the audit log of each process has, once the processes have ended."""
    return {name: sum(_refusals(directory / f"{name}.audit")) for name in PROCESSES}


def _refusals(log: Path) -> Iterator[int]:
    for line in log.read_text().splitlines():
        record = json.loads(line)
        if record["event"] == "refused":
            yield 1
        elif record["event"] == "refused more":
            yield record["count"]


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Cluster]:
    """Run it; `directory` must be short enough for a socket's path."""
    valkey = ValkeyServer(directory / "v")
    async with AsyncExitStack() as stack:
        await valkey.start()
        stack.push_async_callback(valkey.kill)
        cluster = Cluster(directory, await stack.enter_async_context(await valkey.client()), {})
        job_keys(directory)
        ports = ["--host", "127.0.0.1", "--port", "0", "--operator-mtls-port", "0", "--metrics-port", "-1"]
        store = await _start(stack, cluster, "store", [*ports, "--data", str(directory / "data")])
        shared = ["--store", store["operators-mtls"], "--redis-url", valkey.url]
        shared += ["--job-key", str(directory / "job.key")]
        operator = cluster.client_tls("loraplex://operator/o")
        async with AsyncStoreClient(store["operators-mtls"], TENANT, tls=operator) as client:
            base = read_base_model(MODEL)
            await client.register_model(registered(base), base.files)
            await client.push(_adapter(directory / "private"), "private")
        worker = ["--model", MODEL, "--rows", "1", "--metrics-port", "0", "--cache-dir", str(directory / "cache")]
        await asyncio.gather(
            _start(stack, cluster, "router", [*ports, "--mtls-port", "0", *shared]),
            _start(stack, cluster, "worker", [*worker, *shared]),
        )
        async with asyncio.timeout(_TIMEOUT_S):
            while not cluster.relay:
                routers = await cluster.redis.zrange(KEYS.prefix + "routers", 0, -1)
                cluster.relay = routers[0].decode() if routers else ""  # type: ignore[union-attr]  # bytes
                await asyncio.sleep(0.02)
        yield cluster


def _adapter(directory: Path) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]})
    )
    (directory / "adapter_model.safetensors").write_bytes(b"any bytes: the hash model takes them")
    return directory


async def _start(stack: AsyncExitStack, cluster: Cluster, name: str, flags: list[str]) -> Mapping[str, str]:
    directory = cluster.directory
    cert, key, ca = write_tls_files(directory, f"loraplex://{name}/one")
    tls = ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(ca)]
    argv = [sys.executable, "-m", "loraplex", name, *tls, "--audit", str(directory / f"{name}.audit"), *flags]
    environ = {**os.environ, "GRPC_VERBOSITY": "NONE"}
    process = await Process.start(name, argv, log_path=directory / f"{name}.log", environ=environ)
    stack.push_async_callback(process.stop, 10.0)
    ready = dict(await process.started())
    cluster.ports[name] = {"public": ready.pop(name), **ready}
    return cluster.ports[name]
