"""Purges over the relay's port with certificates: workers answer their router, and only routers may ask a router."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from loraplex.relay.v1 import relay_pb2 as pb
from loraplex.relay.v1 import relay_pb2_grpc
from loraplex.router.app import RelayAccess
from loraplex.worker.engine_api import Removal
from loraplex.worker.io.relay.links import ForgetError
from tests.credentials_files import tls_files
from tests.router.dispatch.test_relay_credentials import linked, relaying, until


async def test_a_worker_answers_over_its_link(redis: Redis, tmp_path: Path) -> None:
    router, own = tls_files(tmp_path, "loraplex://router/r"), tls_files(tmp_path, "loraplex://worker/gpu")

    async def forget(tenant: str) -> Mapping[str, Removal]:
        if tenant == "globex":
            raise ForgetError("the store is away")
        return {"jobs": Removal(1, 2), "compiled formats": Removal(3, of_all_tenants=True)}

    async with relaying(redis, router) as relay, linked(own) as (links, _):
        links.follow([relay.address])
        await until(lambda: links.live == (relay.address,))
        assert "not serve yet" in (await relay.service.forgets.ask("gpu/i-1", "acme")).error
        links.forget_tenant = forget
        assert list((await relay.service.forgets.ask("gpu/i-1", "acme")).removals) == [
            pb.Removal(place="jobs", removed=1, left=2),
            pb.Removal(place="compiled formats", removed=3, of_all_tenants=True),
        ]
        assert (await relay.service.forgets.ask("gpu/i-1", "globex")).error == "the store is away"


async def test_only_a_router_may_ask_a_router(tmp_path: Path) -> None:
    class Data:
        """A router without any data."""

        async def forget(self, tenant: str) -> list[pb.Removal]:
            return [pb.Removal(place="jobs", removed=len(tenant))]

    data: Any = Data()
    relay = RelayAccess(tls_files(tmp_path, "loraplex://router/r"), lambda *refused: None)
    relay.serve_tenant_data(data, lambda event, **values: None)
    address = f"127.0.0.1:{relay.bind('127.0.0.1', 0)}"
    await relay.server.start()
    for caller, allowed in (("router/other", True), ("worker/gpu", False), ("operator/ann", False)):
        credentials = tls_files(tmp_path, f"loraplex://{caller}").channel_credentials()
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(address, credentials, options) as channel:
            stub: Any = relay_pb2_grpc.TenantDataServiceStub(channel)
            if allowed:
                answer = await stub.ForgetTenant(pb.ForgetTenantRequest(tenant="acme"))
                assert answer.removals[0].removed == 4
                with pytest.raises(grpc.aio.AioRpcError, match="is not a tenant"):
                    await stub.ForgetTenant(pb.ForgetTenantRequest(tenant="shared"))
            else:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.ForgetTenant(pb.ForgetTenantRequest(tenant="acme"))
                assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    await relay.server.stop(0)
