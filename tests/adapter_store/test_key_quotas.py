"""Adapters and bytes stored by API key, at a real store with credentials."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.admin.v1 import keys_pb2, keys_pb2_grpc, plans_pb2, plans_pb2_grpc, tenants_pb2, tenants_pb2_grpc
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex_client import AsyncStoreClient, ResourceExhaustedError, Tls
from tests.credentials_files import write_tls_files

CONFIG = b"{}"
# Bytes of the files of a revision.
SIZE = len(CONFIG) + len(b"revision  0")


class World:
    """A store with credentials, its operator, and tenants with API keys."""

    def __init__(self, directory: Path, store: Store, operator: grpc.aio.Channel, users: AsyncStoreClient) -> None:
        self.store = store
        self._directory, self._users = directory, users
        self.keys: Any = keys_pb2_grpc.KeyServiceStub(operator)
        self.tenants: Any = tenants_pb2_grpc.TenantServiceStub(operator)
        self._plans: Any = plans_pb2_grpc.PlanServiceStub(operator)

    async def key(self, tenant: str = "acme", **limits: Any) -> tuple[str, str]:
        """Make a key, with a plan if it has limits; return its id and the key."""
        made = await self.keys.CreateKey(keys_pb2.CreateKeyRequest(tenant=tenant, role="tenant-admin"))
        if limits:
            await self.plan(f"keys/{made.key.key_id}", **limits)
        return made.key.key_id, made.api_key

    async def plan(self, name: str, **limits: Any) -> None:
        """Set a plan."""
        await self._plans.SetPlan(plans_pb2.SetPlanRequest(plan=plans_pb2.Plan(name=name, **limits)))

    async def upload(self, key: str, adapter: str, revision: int = 0) -> str:
        """Upload a revision; return the limit that refused it, empty where none did."""
        files = self._directory / str(revision)
        files.mkdir(exist_ok=True)
        (files / "adapter_config.json").write_bytes(CONFIG)
        (files / "adapter_model.safetensors").write_bytes(b"revision %2d" % revision)
        try:
            await self._users.for_caller(api_key=key).push(files, adapter)
        except ResourceExhaustedError as error:
            return error.subject if error.reason == "QUOTA_EXCEEDED" else error.reason
        return ""

    async def delete(self, key: str, adapter: str) -> None:
        """Delete an adapter."""
        await self._users.for_caller(api_key=key).delete(adapter)

    def recorded(self) -> list[str]:
        """Return the ids of the keys that the catalog's revisions came with."""
        with self.store._database.reading() as rows:
            return [row[0] for row in rows.execute("SELECT key_id FROM revision_keys ORDER BY rowid")]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    cert, key, ca = map(str, write_tls_files(tmp_path, "loraplex://store/s"))
    settings = StoreSettings(tmp_path / "data", port=0, operator_mtls_port=0, tls_cert=cert, tls_key=key, tls_ca=ca)
    store = Store(settings)
    await store.start()
    operators = dict(word.split("=") for word in store.addresses[1:])["operators-mtls"]
    cert, key, ca = map(str, write_tls_files(tmp_path, "loraplex://operator/o"))
    tls, base = Tls(ca, cert, key), read_base_model("hash:?vocab=600")
    async with (
        AsyncStoreClient(operators, tls=tls) as operator,
        grpc.aio.secure_channel(operators, tls.channel_credentials()) as channel,
        AsyncStoreClient(store.addresses[0], api_key="none", tls=Tls(ca)) as users,
    ):
        await operator.register_model(registered(base), base.files)
        yield World(tmp_path, store, channel, users)
    await store.stop(0)


async def test_a_key_s_room_is_its_own_and_comes_back(world: World) -> None:
    key_id, key = await world.key(adapters=1, adapter_bytes=2 * SIZE)
    _, other = await world.key()
    assert await world.upload(key, "a") == ""
    assert await world.upload(key, "b") == f"keys/{key_id}/quotas/adapters"
    assert await world.upload(other, "b") == ""
    assert await world.upload(key, "b", 1) == "", "a revision of an adapter of another key"
    assert await world.upload(key, "b", 2) == f"keys/{key_id}/quotas/adapter_bytes"
    assert await world.upload(other, "a", 2) == "", "the other key has no plan"
    await world.delete(other, "b")
    assert await world.upload(key, "a", 3) == ""
    await world.delete(other, "a")
    assert await world.upload(key, "c") == ""
    await world.plan("tenants/acme", adapters=1)
    assert await world.upload(other, "d") == "tenants/acme/quotas/adapters"


async def test_an_adapter_counts_for_the_key_that_made_it(world: World) -> None:
    (first_id, first), (second_id, second) = await world.key(adapters=1), await world.key(adapters=1)
    for revision, key in enumerate((first, second, first, second)):
        assert await world.upload(key, "a", revision) == ""
    assert await world.upload(first, "b") == f"keys/{first_id}/quotas/adapters"
    assert await world.upload(second, "b") == "", "it has made no adapter yet"
    assert await world.upload(second, "c") == f"keys/{second_id}/quotas/adapters"
    assert world.recorded() == [first_id, second_id, first_id, second_id, second_id]
    assert await world.upload(second, "a", 0) == "", "bytes that are there"
    assert world.recorded()[0] == first_id


async def test_uploads_at_the_same_time_share_a_key_s_room(world: World) -> None:
    key_id, key = await world.key(adapters=2, adapter_bytes=3 * SIZE)
    refused = await asyncio.gather(*(world.upload(key, f"a{n}", n) for n in range(8)))
    assert sorted(refused) == ["", "", *[f"keys/{key_id}/quotas/adapters"] * 6]
    made = f"a{refused.index('')}"
    refused = await asyncio.gather(*(world.upload(key, made, n) for n in range(10, 16)))
    assert refused.count("") == 1
    assert len(world.recorded()) == 3


async def test_rotation_gives_no_room_and_a_plan_counts_what_came_before_it(world: World) -> None:
    key_id, key = await world.key()
    assert await world.upload(key, "a") == ""
    await world.plan(f"keys/{key_id}", adapters=1)
    rotated = await world.keys.RotateKey(keys_pb2.RotateKeyRequest(key_id=key_id))
    for secret in (key, rotated.api_key):
        assert await world.upload(secret, "b") == f"keys/{key_id}/quotas/adapters"


async def test_a_purged_tenant_s_keys_leave_no_row(world: World) -> None:
    kept, other = await world.key("globex")
    assert await world.upload(other, "a") == ""
    _, key = await world.key()
    assert await world.upload(key, "a") == ""
    await world.tenants.PurgeTenant(tenants_pb2.PurgeTenantRequest(tenant="acme"))
    assert world.recorded() == [kept]
