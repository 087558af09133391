"""Workers at a store with credentials: they download what a router's grant names, and nothing else."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.broker.messages import AdapterRef
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.tenancy.signatures import GRANT_S, RevisionGrantIssuer, Signer
from loraplex.worker.io.adapters.disk import DiskTier
from loraplex.worker.io.adapters.fetch import AdapterFetcher, DownloadTimeouts, FetchFailedError
from loraplex.worker.io.membership import wait_until_registered
from loraplex_client import AsyncStoreClient, Tls
from tests.credentials_files import tls_files
from tests.worker.io.adapters.test_fetch import adapter


class World:
    """A store with two adapters of acme, and a worker's fetcher."""

    def __init__(self, directory: Path, fetcher: AdapterFetcher, refs: list[AdapterRef], store: Store) -> None:
        self.directory, self.fetcher, self.refs, self.store = directory, fetcher, refs, store

    def grant(self, role: Role, tenant: str, *names: str, age_s: float = 0.0) -> bytes:
        """Return a grant that such a part of the cluster has signed."""
        signer = Signer(tls_files(self.directory, f"loraplex://{role.value}/signer"), role)
        return RevisionGrantIssuer(signer, lambda: time.time() - age_s).issue(tenant, names)

    async def fetch(self, ref: AdapterRef, grant: bytes, tenant: str = "acme") -> str:
        """Return why a fetch failed; empty: it did not."""
        pin = self.fetcher.disk_pin()
        try:
            await pin.fetch([replace(ref, grant=grant)], tenant)
        except FetchFailedError as error:
            return error.failure.message
        finally:
            pin.release()
        return ""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    tls_files(tmp_path, "loraplex://store/s")
    cert, key, ca = (str(tmp_path / name) for name in ("store-s.pem", "store-s-key.pem", "ca-store-s/ca.pem"))
    settings = StoreSettings(tmp_path / "store", port=0, operator_mtls_port=0, tls_cert=cert, tls_key=key, tls_ca=ca)
    store = Store(settings)
    await store.start()
    address = dict(word.split("=") for word in store.addresses[1:])["operators-mtls"]
    tls_files(tmp_path, "loraplex://operator/o")
    operator = Tls(tmp_path / "ca-operator-o" / "ca.pem", tmp_path / "operator-o.pem", tmp_path / "operator-o-key.pem")
    base, refs = read_base_model("hash:?vocab=600"), []
    async with AsyncStoreClient(address, "acme", tls=operator) as client:
        await client.register_model(registered(base), base.files)
        for name in "ab":
            made = (await client.push(adapter(tmp_path / name, name), name)).revision
            refs.append(AdapterRef(made.name, made.digest, made.rank, made.weight_bytes))
    disk = DiskTier.open(tmp_path / "cache", 1 << 30)
    worker = tls_files(tmp_path, "loraplex://worker/w")
    fetcher = AdapterFetcher(address, disk, DownloadTimeouts(10.0, 10.0), tls=worker)
    yield World(tmp_path, fetcher, refs, store)
    await fetcher.close()
    await disk.close()
    await store.stop(0)


async def test_a_worker_gets_what_a_router_granted_for_its_time(world: World) -> None:
    one, other = world.refs
    for grant, why in (
        (b"", "needs a router's grant"),
        (b"none", "cannot be read"),
        (b"\x93\xa1\xff\x90\xc4\x00", "cannot be read"),
        (world.grant(Role.ROUTER, "acme", other.revision), "another revision or tenant"),
        (world.grant(Role.ROUTER, "globex", one.revision), "another revision or tenant"),
        (world.grant(Role.WORKER, "acme", one.revision), "names worker/signer, not a router"),
        (world.grant(Role.OPERATOR, "acme", one.revision), "names operator/signer, not a router"),
        (world.grant(Role.ROUTER, "acme", one.revision, age_s=GRANT_S), "has expired"),
    ):
        assert why in await world.fetch(one, grant)
    assert "needs a router's grant" in await world.fetch(one, b"", tenant="globex")
    assert await world.fetch(one, world.grant(Role.ROUTER, "acme", other.revision, one.revision)) == ""
    refused = world.store.metrics.refused
    assert [refused.labels(reason)._value.get() for reason in ("GRANT_MISSING", "GRANT_INVALID")] == [2, 7]


async def test_what_is_no_tenant_s_is_open_to_workers(world: World) -> None:
    await wait_until_registered(world.fetcher.store, read_base_model("hash:?vocab=600"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.fetcher.store.ListAdapters(adapters_pb2.ListAdaptersRequest())
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
