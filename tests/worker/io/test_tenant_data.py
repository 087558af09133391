"""A worker's adapters after a purge: those that no tenant has any more leave, and no others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.admin.v1 import tenants_pb2, tenants_pb2_grpc
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.broker.messages import AdapterRef, WeightedRef
from loraplex.worker.engine_api import Removal
from loraplex.worker.io.adapters.disk import DiskTier
from loraplex.worker.io.adapters.fetch import AdapterFetcher, DownloadTimeouts
from loraplex.worker.io.commands import TenantData, drop_gone_revisions, gone_revisions
from loraplex.worker.ipc import ForgetTenant, TenantForgotten
from loraplex_client import AsyncStoreClient
from tests.worker.io.adapters.test_fetch import adapter


async def push(address: str, tenant: str, directory: Path) -> AdapterRef:
    """Upload an adapter of a tenant."""
    async with AsyncStoreClient(address, tenant=tenant) as client:
        revision = (await client.push(directory, "support")).revision
    return AdapterRef(revision.name, revision.digest, revision.rank, revision.weight_bytes)


async def purge(address: str, tenant: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = tenants_pb2_grpc.TenantServiceStub(channel)
        await stub.PurgeTenant(tenants_pb2.PurgeTenantRequest(tenant=tenant))


async def test_what_no_tenant_has_any_more_leaves_the_disk(tmp_path: Path) -> None:
    store = Store(StoreSettings(data=tmp_path / "data", port=0))
    await store.start()
    address, base = f"127.0.0.1:{store.port}", await asyncio.to_thread(read_base_model, "hash:?")
    async with AsyncStoreClient(address) as operator:
        await operator.register_model(registered(base), base.files)
    directories = [adapter(tmp_path / name, name) for name in "ab"]
    refs = [await push(address, tenant, directories[0]) for tenant in ("acme", "globex")]
    assert refs[0].digest == refs[1].digest, "the same bytes"
    refs.append(await push(address, "initech", directories[1]))
    disk = DiskTier.open(tmp_path / "cache", 0)
    fetcher = AdapterFetcher(address, disk, DownloadTimeouts(total_s=20.0, silent_s=5.0))
    running, ended = fetcher.disk_pin(), fetcher.disk_pin()
    await running.fetch([refs[2]], "initech")
    await ended.fetch([refs[0]], "acme")
    ended.release()
    await purge(address, "acme")
    await drop_gone_revisions(fetcher)
    assert disk.digests == {refs[0].digest, refs[2].digest}, "globex has it too"
    for tenant in ("globex", "initech"):
        await purge(address, tenant)
    gone = await gone_revisions(fetcher.channel, disk.digests)
    assert await disk.forget(gone) == Removal(removed=1, left=1), "an answer runs with the other"
    running.release()
    await drop_gone_revisions(fetcher)
    assert (disk.digests, list((tmp_path / "cache").glob("*-*"))) == (set(), [])
    await fetcher.close()
    await store.stop(drain_s=0)
    await drop_gone_revisions(fetcher)  # nothing is there: the store is not asked
    await disk.close()


async def test_an_adapter_that_comes_while_the_store_is_asked_is_kept(tmp_path: Path) -> None:
    jobs: list[Any] = []
    kept: list[frozenset[str]] = []

    def begin(ref: AdapterRef) -> None:
        jobs.append(SimpleNamespace(job=SimpleNamespace(tenant="globex", adapter=ref)))

    class Tenants(tenants_pb2_grpc.TenantServiceServicer):
        async def ListGoneRevisions(self, request: Any, context: Any) -> tenants_pb2.ListGoneRevisionsResponse:
            begin(single)
            begin(AdapterRef("set", "set", 8, 2, (WeightedRef(single, 0.5), WeightedRef(single, 0.5))))
            return tenants_pb2.ListGoneRevisionsResponse(digests=["old"])

        async def PurgeTenant(self, request: Any, context: Any) -> tenants_pb2.PurgeTenantResponse:
            raise NotImplementedError

    def send(question: ForgetTenant) -> None:
        kept.append(question.kept_adapters)
        asyncio.get_running_loop().call_soon(data.answered, TenantForgotten({}))

    async def report() -> None:
        pass

    single = AdapterRef("tenants/globex/adapters/a/revisions/new", "new", 4, 1)
    begin(AdapterRef("tenants/acme/adapters/a/revisions/old", "old", 4, 1))
    server = grpc.aio.server()
    tenants_pb2_grpc.add_TenantServiceServicer_to_server(Tenants(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    disk = DiskTier.open(tmp_path, 0)
    fetcher = AdapterFetcher(address, disk, DownloadTimeouts(total_s=20.0, silent_s=5.0))
    results: Any = SimpleNamespace(jobs=SimpleNamespace(all=lambda: jobs), stats=SimpleNamespace(adapters=("slot",)))
    commands: Any = SimpleNamespace(forget_tenant=lambda tenant: 0, adapters=())
    engine: Any = SimpleNamespace(send=send)
    usage: Any = SimpleNamespace(report=report)
    data = TenantData(fetcher, engine, results, commands, usage)
    # Sets that no job uses any more, by their last users and their only parts.
    for digest, tenant, part in (("idle", "globex", "new"), ("its own", "acme", "new"), ("broken", "globex", "old")):
        parts = (WeightedRef(AdapterRef(part, part, 4, 1), 1.0),)
        fetcher.sets.note(AdapterRef(digest, digest, 4, 1, parts), tenant)
    await data.forget("acme")
    assert kept == [{"slot", "new", "set", "idle"}]
    await fetcher.close()
    await server.stop(0)
    await disk.close()
