"""The asyncio client of an adapter store: StoreClient's methods, awaited. Their docstrings are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Self

from loraplex.adapters.v1 import adapters_pb2, adapters_pb2_grpc

from loraplex_client import adapters
from loraplex_client.addresses import read_addresses
from loraplex_client.connection import AsyncConnection
from loraplex_client.credentials import ApiKey, Tls, credentials_of
from loraplex_client.resources import Adapter, BaseModel, FitnessCertificate, Pushed, Revision


class AsyncStoreClient:
    """StoreClient on the running event loop."""

    def __init__(
        self,
        address: str | Sequence[str],
        tenant: str = "",
        *,
        timeout_s: float | None = None,
        api_key: ApiKey | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.address = ",".join(read_addresses(address))
        self._connection = AsyncConnection(
            address,
            adapters_pb2_grpc.AdapterServiceStub,
            tenant=tenant,
            timeout_s=timeout_s,
            credentials=credentials_of(api_key, tls),
        )
        self.tenant = self._connection.tenant

    def for_caller(self, tenant: str = "", api_key: ApiKey = "") -> Self:
        other = copy(self)
        other._connection = self._connection.for_caller(tenant, api_key)
        other.tenant = other._connection.tenant
        return other

    async def push(
        self,
        directory: str | Path,
        name: str,
        *,
        base_model: str = "",
        alias: str = "",
        progress: adapters.Progress | None = None,
    ) -> Pushed:
        header = adapters_pb2.UploadHeader(adapter=name, base_model=base_model, alias=alias)
        return await self._connection.run(adapters.push(Path(directory), header, progress))

    async def list(self, tenant: str = "") -> tuple[Adapter, ...]:
        return await self._connection.run(adapters.list_adapters(f"tenants/{tenant}" if tenant else ""))

    async def get(self, name: str) -> tuple[Adapter, Revision]:
        return await self._connection.run(adapters.get_adapter(name))

    async def delete(self, name: str, *, purge: bool = False) -> None:
        await self._connection.run(adapters.delete_adapter(adapters.full_name(name, self.tenant), purge=purge))

    async def revisions(self, name: str) -> tuple[Revision, ...]:
        return await self._connection.run(adapters.list_revisions(adapters.full_name(name, self.tenant)))

    async def set_alias(self, name: str, alias: str, digest: str) -> Adapter:
        return await self._connection.run(adapters.set_alias(adapters.full_name(name, self.tenant), alias, digest))

    async def certify(self, revision: str, certificate: FitnessCertificate) -> FitnessCertificate:
        return await self._connection.run(adapters.certify(revision, certificate))

    async def download(self, name: str, directory: str | Path) -> Revision:
        return await self._connection.run(adapters.download(name, Path(directory)))

    async def register_model(self, model: BaseModel, files: Mapping[str, bytes], *, replace: bool = False) -> BaseModel:
        return await self._connection.run(adapters.register_model(model, files, replace))

    async def models(self) -> tuple[BaseModel, ...]:
        return await self._connection.run(adapters.list_models())

    async def close(self) -> None:
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
