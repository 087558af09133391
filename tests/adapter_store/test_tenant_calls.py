"""A store's bound of tenants' calls, at a real server: a tenant that reads no answer takes its own share alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc

from loraplex.adapter_store.open_calls import TenantCalls
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.tenancy.api_keys import ApiKeyReader, HashedKey, HashedSecret, KeyDirectory, new_api_key
from loraplex.runtime.tenancy.guard import Guard
from loraplex.runtime.tenancy.permissions import Port


class Large(adapters_pb2_grpc.AdapterServiceServicer):
    """Sends more than a connection takes from a client that does not read."""

    async def DownloadRevision(self, request: Any, context: Any) -> AsyncIterator[pb.DownloadRevisionResponse]:
        """Send a short message, then long ones."""
        yield pb.DownloadRevisionResponse(revision=pb.Revision(name="r"))
        for _ in range(100):
            yield pb.DownloadRevisionResponse(chunk=pb.FileChunk(data=bytes(1 << 20)))


class Served:
    """A server with two tenants."""

    def __init__(self, calls: TenantCalls) -> None:
        directory, self._texts = KeyDirectory(), dict[str, str]()
        for tenant in ("acme", "globex"):
            key_id, self._texts[tenant], sha256 = new_api_key()
            secrets = (HashedSecret(sha256),)
            directory.put([HashedKey(key_id, tenant, Role.TENANT_USER, frozenset(), None, False, secrets)])
        self.server = Server(Guard([Port.PUBLIC], [ApiKeyReader(directory)]), interceptors=[calls])
        service: Any = Large  # grpc has its own methods for those left out
        adapters_pb2_grpc.add_AdapterServiceServicer_to_server(service(), self.server.services)
        self.stub: Any

    def download(self, tenant: str) -> Any:
        """Begin a download."""
        metadata = (("authorization", f"Bearer {self._texts[tenant]}"),)
        return self.stub.DownloadRevision(pb.DownloadRevisionRequest(), metadata=metadata)


@asynccontextmanager
async def serving(calls: TenantCalls) -> AsyncIterator[Served]:
    """Run a server with these bounds."""
    served = Served(calls)
    port = served.server.bind("127.0.0.1", 0)
    await served.server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            served.stub = adapters_pb2_grpc.AdapterServiceStub(channel)
            yield served
    finally:
        await served.server.stop(0)


async def begins(served: Served, tenant: str) -> None:
    """Download again and again until a download begins: the server hears of ends a little later."""
    async with asyncio.timeout(60):
        while True:
            call = served.download(tenant)
            with suppress(grpc.aio.AioRpcError):
                if await call.read() is not grpc.aio.EOF:
                    break
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    call.cancel()


async def rest(call: Any) -> None:
    """Read a download to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_tenant_s_calls_leave_room_for_others() -> None:
    async with serving(TenantCalls(downloads=4)) as served:
        unread = [served.download("acme") for _ in range(2)]
        for call in unread:
            assert (await call.read()).revision.name == "r"
        refused = served.download("acme")
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await refused.details() == "acme has its share of the 4 downloads that this store serves at once"
        other = served.download("globex")
        assert (await other.read()).revision.name == "r"
        for call in (*unread, other):
            call.cancel()
        await begins(served, "acme")


async def test_a_download_that_nobody_reads_ends() -> None:
    async with serving(TenantCalls(downloads=2, silent_s=0.05)) as served:
        unread = served.download("acme")
        assert (await unread.read()).revision.name == "r"
        await begins(served, "acme")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(unread)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
