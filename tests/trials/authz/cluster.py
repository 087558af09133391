"""A store and a router with credentials on, as processes of their own, with all of their ports."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from loraplex.cli.development_ca import DevelopmentCa, write_private
from loraplex.contracts.broker.job_keys import new_job_key
from loraplex.runtime.rpc.children.process import Process
from loraplex.runtime.tenancy.api_keys import new_api_key
from loraplex.runtime.tenancy.permissions import REFLECTION_SERVICE, SGLANG_SERVICE
from tests.trials.authz.cases import SERVERS
from tests.trials.authz.credentials import Credentials, Issuer, make_certificates, make_keys
from tests.valkey_server import ValkeyServer

Ports = Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """Addresses by process and port, and the credentials."""

    ports: Mapping[str, Ports]
    credentials: Credentials
    bootstrap: str


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Cluster]:
    """Run them; `directory` must be short enough for a socket's path."""
    ca = DevelopmentCa()
    made, issuer, bootstrap = Credentials(ca), Issuer(directory), new_api_key()[1]
    make_certificates(made)
    issuer.make_tokens(made)
    write_private(directory / "operator.key", bootstrap.encode())
    write_private(directory / "job.key", new_job_key().encode())
    valkey = ValkeyServer(directory / "v")
    async with AsyncExitStack() as stack:
        await valkey.start()
        stack.push_async_callback(valkey.kill)
        common = ["--jwt-issuers", str(issuer.file)]
        for flag in ("--port", "--mtls-port", "--operator-port", "--operator-mtls-port"):
            common += [flag, "0"]
        flags = [*common, "--data", str(directory / "data"), "--bootstrap-key", str(directory / "operator.key")]
        store = await _start(stack, directory, ca, "store", flags)
        flags = [*common, "--store", store["operators-mtls"], "--redis-url", valkey.url]
        flags += ["--job-key", str(directory / "job.key")]
        flags += ["--engine-protocol", "sglang,vllm"] if SGLANG_SERVICE in SERVERS else []
        flags += ["--reflection"] if REFLECTION_SERVICE in SERVERS else []
        router = await _start(stack, directory, ca, "router", flags)
        credentials = grpc.ssl_channel_credentials(ca.pem)
        async with grpc.aio.secure_channel(store["operators"], credentials) as channel:
            await make_keys(made, channel, bootstrap)
        yield Cluster({"store": store, "router": router}, made, bootstrap)


async def _start(stack: AsyncExitStack, directory: Path, ca: DevelopmentCa, name: str, flags: list[str]) -> Ports:
    cert, key = ca.write(directory, name, ca.issue(f"loraplex://{name}/{name}", ["127.0.0.1"]))
    tls = ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(ca.write_ca(directory))]
    argv = [sys.executable, "-m", "loraplex", name, "--host", "127.0.0.1", "--metrics-port", "-1", *tls, *flags]
    environ = {**os.environ, "GRPC_VERBOSITY": "ERROR"}
    process = await Process.start(name, argv, log_path=directory / f"{name}.log", environ=environ)
    stack.push_async_callback(process.kill)
    ready = dict(await process.started())
    return {"public": ready.pop(name), **ready}
