"""A cluster of this machine with credentials and plans, and a tenant with an API key."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc

from bench.local_cluster import set_plans
from loraplex.admin.v1 import keys_pb2, keys_pb2_grpc
from loraplex.admin.v1.plans_pb2 import Plan
from loraplex.cli.credentials import make_credentials, make_first_key
from loraplex.cli.local import FIRST_KEY, ClusterSettings, LocalCluster
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex_client import AsyncStoreClient, Tls

TENANT = "bench"
# Limits that the benchmark does not reach, of its tenant; its key has some too.
_PLAN = Plan(
    name=f"tenants/{TENANT}", concurrent_streams=100_000, output_tokens_per_minute=10**12, tokens_per_month=10**12
)


class SecuredCluster(LocalCluster):
    """A LocalCluster with an authority of its own; `directory` gets its certificates and files."""

    def __init__(self, settings: ClusterSettings, directory: Path) -> None:
        make_credentials(directory)
        make_first_key(directory / FIRST_KEY)
        usage = ("--usage-file", str(directory / "usage.jsonl"))
        super().__init__(
            replace(
                settings,
                credentials=directory,
                router_flags=(*settings.router_flags, *usage),
            )
        )
        self.tls = Tls(ca=directory / "ca.pem")
        self._directory = directory

    async def prepare(self) -> str:
        """Register the model as an operator, wait until the cluster serves; return an API key of the tenant."""
        first = (self._directory / FIRST_KEY).read_text().strip()
        async with AsyncStoreClient(self.operators, TENANT, api_key=first, tls=self.tls) as store:
            base = await asyncio.to_thread(read_base_model, self.settings.model)
            await store.register_model(registered(base), base.files)
        credentials = grpc.ssl_channel_credentials((self._directory / "ca.pem").read_bytes())
        async with grpc.aio.secure_channel(self.operators, credentials) as channel:
            stub: keys_pb2_grpc.KeyServiceAsyncStub = keys_pb2_grpc.KeyServiceStub(channel)
            metadata = (("authorization", f"Bearer {first}"),)
            await set_plans(channel, _PLAN, metadata=metadata)
            made = await stub.CreateKey(keys_pb2.CreateKeyRequest(tenant=TENANT), metadata=metadata)
        await self.wait_serving()
        return made.api_key
