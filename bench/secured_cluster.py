"""A cluster of this machine with credentials: TLS and API keys at its doors, certificates between its parts, plans."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex.admin.v1 import keys_pb2, keys_pb2_grpc
from loraplex_client import AsyncStoreClient, Tls

from artifacts.base_model import read_base_model
from broker.job_keys import new_job_key
from clients.cli.models import registered
from deploy.local import ClusterSettings, LocalCluster
from rpc.server import channel_options
from tenancy.api_keys import new_api_key
from tenancy.development_ca import DevelopmentCa, write_private

TENANT = "bench"
# Limits that the benchmark does not reach, of its tenant; its key has some too.
_PLANS = f"""
[tenants.{TENANT}]
concurrent_streams = 100_000
output_tokens_per_minute = 1_000_000_000_000
tokens_per_month = 1_000_000_000_000
"""


class SecuredCluster(LocalCluster):
    """A LocalCluster with an authority of its own; `directory` gets its certificates and files."""

    def __init__(self, settings: ClusterSettings, directory: Path) -> None:
        super().__init__(settings)
        self._ca = DevelopmentCa()
        self._directory = directory
        self._bootstrap = new_api_key()[1]
        self.tls = Tls(ca=self._ca.write_ca(directory))
        write_private(directory / "operator.key", self._bootstrap.encode())
        write_private(directory / "job.key", new_job_key().encode())
        (directory / "plans.toml").write_text(_PLANS)

    async def _spawn_service(self, name: str, flags: list[str]) -> None:
        room, directory = name.partition("-")[0], self._directory
        cert, key = self._ca.write(directory, name, self._ca.issue(f"loraplex://{room}/{name}", [self.settings.host]))
        flags += ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(directory / "ca.pem")]
        if room == "store":
            flags += ["--operator-port", "0", "--operator-mtls-port", "0"]
            flags += ["--bootstrap-key", str(directory / "operator.key"), "--plans", str(directory / "plans.toml")]
        else:
            flags += ["--job-key", str(directory / "job.key")]
            flags[flags.index("--store") + 1] = (await self.processes["store"].wait_ready())["operators-mtls"]
        if room == "router":
            flags += ["--usage-file", str(directory / f"{name}.jsonl")]
        await super()._spawn_service(name, flags)

    async def _router_serving(self, address: str) -> None:
        credentials = grpc.ssl_channel_credentials(self._ca.pem)
        async with grpc.aio.secure_channel(address, credentials, options=channel_options()) as channel:
            async for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return

    async def prepare(self) -> str:
        """Register the model as an operator, wait until the cluster serves; return an API key of the tenant."""
        operators = (await self.processes["store"].wait_ready())["operators"]
        async with AsyncStoreClient(operators, TENANT, api_key=self._bootstrap, tls=self.tls) as store:
            base = await asyncio.to_thread(read_base_model, self.settings.model)
            await store.register_model(registered(base), base.files)
        async with grpc.aio.secure_channel(operators, grpc.ssl_channel_credentials(self._ca.pem)) as channel:
            stub: keys_pb2_grpc.KeyServiceAsyncStub = keys_pb2_grpc.KeyServiceStub(channel)
            metadata = (("authorization", f"Bearer {self._bootstrap}"),)
            made = await stub.CreateKey(keys_pb2.CreateKeyRequest(tenant=TENANT), metadata=metadata)
        await self.wait_serving()
        return made.api_key
