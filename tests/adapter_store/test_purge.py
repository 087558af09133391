"""A purged tenant has left nothing at the store: no row, no file, no byte of its name; others keep what is theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from loraplex.adapters.v1 import adapters_pb2

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.admin.v1 import (
    grants_pb2,
    grants_pb2_grpc,
    keys_pb2,
    keys_pb2_grpc,
    plans_pb2,
    plans_pb2_grpc,
    tenants_pb2_grpc,
)
from loraplex.admin.v1 import tenants_pb2 as pb
from loraplex.contracts.artifacts.base_model import BaseModel

TENANT, OTHER = "purgedtenant", "globex"
NAMED = "secretproject"


def files(weights: bytes) -> dict[str, bytes]:
    """Return an adapter's files."""
    return {"adapter_config.json": b"{}", "adapter_model.safetensors": weights}


@pytest.fixture
async def stubs(store: Store) -> AsyncIterator[dict[str, Any]]:
    """Stubs of the operators' services."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        yield {
            "keys": keys_pb2_grpc.KeyServiceStub(channel),
            "grants": grants_pb2_grpc.GrantServiceStub(channel),
            "plans": plans_pb2_grpc.PlanServiceStub(channel),
            "tenants": tenants_pb2_grpc.TenantServiceStub(channel),
        }


async def grant(stubs: dict[str, Any], adapter: str, owner: str, to: str) -> None:
    request = grants_pb2.CreateGrantRequest(adapter=adapter, tenant=to, ttl=Duration(seconds=60))
    await stubs["grants"].CreateGrant(request, metadata=(("x-loraplex-tenant", owner),))


async def fill(client: Any, stubs: dict[str, Any]) -> str:
    """Give the tenant one thing of each kind; returns the id of its API key."""
    await client.upload(NAMED, files(b"own"), TENANT)
    await client.upload(NAMED, files(b"common"), TENANT, alias="canary")
    await client.upload("deleted", files(b"deleted"), TENANT)
    await client.call("DeleteAdapter", adapters_pb2.DeleteAdapterRequest(name="deleted"), TENANT)
    await client.upload("theirs", files(b"common"), OTHER)
    await grant(stubs, NAMED, TENANT, OTHER)
    await grant(stubs, "theirs", OTHER, TENANT)
    for tenant in (TENANT, OTHER):
        await stubs["plans"].SetPlan(plans_pb2.SetPlanRequest(plan=plans_pb2.Plan(name=f"tenants/{tenant}")))
    made = await stubs["keys"].CreateKey(keys_pb2.CreateKeyRequest(tenant=TENANT, label=f"of {TENANT}"))
    await stubs["plans"].SetPlan(plans_pb2.SetPlanRequest(plan=plans_pb2.Plan(name=f"keys/{made.key.key_id}")))
    await stubs["keys"].CreateKey(keys_pb2.CreateKeyRequest(tenant=OTHER))
    return str(made.key.key_id)


def written_in(directory: Path) -> dict[Path, bytes]:
    """Return the files below a directory."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


async def test_nothing_is_left_of_a_tenant_but_what_others_have_too(
    client: Any, stubs: dict[str, Any], store_settings: StoreSettings, hash_base: BaseModel
) -> None:
    await client.register(hash_base)
    key_id = await fill(client, stubs)
    before = await stubs["keys"].ListKeyChanges(keys_pb2.ListKeyChangesRequest())
    purged = await stubs["tenants"].PurgeTenant(pb.PurgeTenantRequest(tenant=TENANT))
    assert list(purged.left) == []
    assert purged.removed_count == len(purged.removed)
    kinds = Counter(name.split("/")[-2] for name in purged.removed)
    assert kinds == {"adapters": 1, "revisions": 3, "grants": 2, "keys": 2, "tenants": 1, "blobs": 2}, purged.removed
    assert len(purged.kept_for_others) == 2, "the common weights, and the configuration"
    after = await stubs["keys"].ListKeyChanges(keys_pb2.ListKeyChangesRequest(epoch=before.epoch, after=before.latest))
    assert after.epoch != before.epoch
    assert [key.key.tenant for key in after.keys] == [OTHER]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stubs["plans"].GetPlan(plans_pb2.GetPlanRequest(name=f"keys/{key_id}"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert (await client.download(theirs := (await client.get("theirs", OTHER)).revision.name, OTHER))[1] == files(
        b"common"
    ), theirs
    written = written_in(store_settings.data)
    assert [path for path, data in written.items() if TENANT.encode() in data or NAMED.encode() in data] == []
    assert not any(data in {b"own", b"deleted"} for data in written.values())
    again = await stubs["tenants"].PurgeTenant(pb.PurgeTenantRequest(tenant=TENANT))
    assert (again.removed_count, list(again.left)) == (0, [])


async def test_a_purged_adapter_has_no_files_at_once(
    client: Any, store_settings: StoreSettings, hash_base: BaseModel
) -> None:
    await client.register(hash_base)
    for purge in (False, True):
        revision = (await client.upload("support", files(b"weights"))).revision.name
        await client.call("DeleteAdapter", adapters_pb2.DeleteAdapterRequest(name="support", purge=purge))
        assert (b"weights" in written_in(store_settings.data / "blobs").values()) != purge
        if purge:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.download(revision)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("tenant", ["", "shared", "a/b"])
async def test_what_is_no_tenant_is_refused(stubs: dict[str, Any], tenant: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stubs["tenants"].PurgeTenant(pb.PurgeTenantRequest(tenant=tenant))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
