"""A tenant's administrator makes, lists and revokes its tenant's keys, and reads its accounts and plans."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraplex.adapter_store.accounts import StoredAccounts
from loraplex.adapter_store.api_keys import _DAY_NS, ApiKeys
from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.adapter_store.embedded import EmbeddedDatabase
from loraplex.admin.v1 import accounts_pb2, accounts_pb2_grpc, keys_pb2_grpc, plans_pb2, plans_pb2_grpc
from loraplex.admin.v1 import keys_pb2 as pb
from loraplex.contracts.plans import windows_at
from loraplex.runtime.rpc.errors import Exhausted
from loraplex.runtime.rpc.principal import Role
from loraplex_client import Tls
from tests.credentials_files import write_tls_files


class World:
    """A store with credentials, whose operator makes keys."""

    def __init__(self, store: Store, operators: grpc.aio.Channel, tenants: grpc.aio.Channel) -> None:
        self.store, self.operators, self.tenants = store, operators, tenants
        self.operator: Any = keys_pb2_grpc.KeyServiceStub(operators)
        self._tenants: Any = keys_pb2_grpc.KeyServiceStub(tenants)

    def bearer(self, key: pb.CreateKeyResponse) -> tuple[str, str]:
        """Return the metadata of a call with a key."""
        return "authorization", f"Bearer {key.api_key}"

    async def key(self, tenant: str = "acme", role: str = "tenant-admin", *scopes: str) -> pb.CreateKeyResponse:
        """Make a key as the operator."""
        made = await self.operator.CreateKey(pb.CreateKeyRequest(tenant=tenant, role=role, scopes=scopes))
        assert isinstance(made, pb.CreateKeyResponse)
        return made

    async def ask(self, key: pb.CreateKeyResponse, method: str, request: Any) -> Any:
        """Call a method with a key at the port for tenants."""
        return await getattr(self._tenants, method)(request, metadata=(self.bearer(key),))

    async def refused(self, key: pb.CreateKeyResponse, method: str, request: Any) -> tuple[str, str]:
        """Return the code and the message with which a call is refused."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.ask(key, method, request)
        return caught.value.code().name, str(caught.value.details())


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[World]:
    """Run a store."""
    cert, key, ca = map(str, write_tls_files(tmp_path, "loraplex://store/s"))
    files: dict[str, Any] = {"tls_cert": cert, "tls_key": key, "tls_ca": ca, "audit": str(tmp_path / "audit.jsonl")}
    settings = StoreSettings(tmp_path / "data", port=0, operator_mtls_port=0, **files)
    store = Store(settings)
    await store.start()
    operators = dict(word.split("=") for word in store.addresses[1:])["operators-mtls"]
    cert, key, ca = map(str, write_tls_files(tmp_path, "loraplex://operator/o"))
    async with (
        grpc.aio.secure_channel(operators, Tls(ca, cert, key).channel_credentials()) as operator,
        grpc.aio.secure_channel(store.addresses[0], Tls(ca).channel_credentials()) as tenants,
    ):
        yield World(store, operator, tenants)
    await store.stop(0)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as found:
        yield found


async def test_an_administrator_makes_lists_and_revokes_keys_of_its_tenant(world: World) -> None:
    admin, other = await world.key(), await world.key("globex")
    made = await world.ask(admin, "CreateKey", pb.CreateKeyRequest(label="ci", scopes=["generate"]))
    assert (made.key.tenant, made.key.role) == ("acme", "tenant-user")
    second = await world.ask(admin, "CreateKey", pb.CreateKeyRequest(tenant="acme", role="tenant-admin"))
    assert second.key.role == "tenant-admin"
    for request in (pb.ListKeysRequest(), pb.ListKeysRequest(tenant="acme")):
        listed = await world.ask(second, "ListKeys", request)
        assert {key.key_id for key in listed.keys} == {one.key.key_id for one in (admin, made, second)}
    revoked = await world.ask(admin, "RevokeKey", pb.RevokeKeyRequest(key_id=made.key.key_id))
    assert revoked.key.HasField("revoke_time")
    assert {key.tenant for key in (await world.ask(other, "ListKeys", pb.ListKeysRequest())).keys} == {"globex"}


async def test_the_audit_log_has_who_made_a_key(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        admin = await world.key()
        made = await world.ask(admin, "CreateKey", pb.CreateKeyRequest())
        await world.ask(admin, "RevokeKey", pb.RevokeKeyRequest(key_id=made.key.key_id))
    records = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    calls = [(one["method"], one["tenant"], one["details"]["key_id"]) for one in records if one["event"] == "call"]
    key_id = made.key.key_id
    assert calls[1:] == [("KeyService/CreateKey", "acme", key_id), ("KeyService/RevokeKey", "acme", key_id)]
    assert admin.key.key_id in [one for one in records if one["event"] == "call"][-1]["caller"]


async def test_other_tenants_keys_look_as_if_they_did_not_exist(world: World) -> None:
    admin, other = await world.key(), await world.key("globex")
    operator = await world.key("", "operator")
    for key_id in (other.key.key_id, operator.key.key_id, "0123456789abcdef"):
        code, message = await world.refused(admin, "RevokeKey", pb.RevokeKeyRequest(key_id=key_id))
        assert (code, message.replace(key_id, "KEYID")) == ("NOT_FOUND", "key not found: KEYID")
    assert not [
        key for key in (await world.operator.ListKeys(pb.ListKeysRequest())).keys if key.HasField("revoke_time")
    ]


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("CreateKey", pb.CreateKeyRequest(tenant="globex"), "tenant"),
        ("ListKeys", pb.ListKeysRequest(tenant="globex"), "tenant"),
        ("CreateKey", pb.CreateKeyRequest(role="operator"), "role"),
        ("CreateKey", pb.CreateKeyRequest(role="auditor"), "role"),
        ("RotateKey", pb.RotateKeyRequest(key_id="0123456789abcdef"), "role tenant-admin"),
    ],
)
async def test_what_an_administrator_may_not(world: World, method: str, request_: Any, field: str) -> None:
    code, message = await world.refused(await world.key(), method, request_)
    assert code == "PERMISSION_DENIED"
    assert message.startswith(field)


async def test_a_key_has_no_scope_that_its_maker_has_not(world: World) -> None:
    admin = await world.key("acme", "tenant-admin", "keys.write", "generate")
    for scopes in (["adapters.write"], ["generate", "keys.read"], []):
        code, message = await world.refused(admin, "CreateKey", pb.CreateKeyRequest(scopes=scopes))
        assert (code, message) == ("PERMISSION_DENIED", "scopes: give some of your own, generate, keys.write")
    made = await world.ask(admin, "CreateKey", pb.CreateKeyRequest(scopes=["tokenize"]))
    assert list(made.key.scopes) == ["tokenize"], "generate includes it"
    assert (await world.refused(admin, "ListKeys", pb.ListKeysRequest()))[0] == "PERMISSION_DENIED"
    user = await world.key("acme", "tenant-user")
    assert (await world.refused(user, "CreateKey", pb.CreateKeyRequest()))[0] == "PERMISSION_DENIED"


def test_an_administrator_makes_so_many_keys_a_day(tmp_path: Path) -> None:
    database, now = EmbeddedDatabase(tmp_path / "catalog"), [_DAY_NS]
    keys = ApiKeys(database, lambda _: None, lambda: now[0])

    def create(tenant: str = "acme", *, is_own: bool = True) -> str:
        return keys.create(tenant, Role.TENANT_USER, frozenset(), "", None, 2 if is_own else None)[0].key_id

    first = create()
    create(is_own=False)
    with pytest.raises(Exhausted, match="acme has 2 keys"):
        create()
    create("globex")
    create(is_own=False)
    keys.revoke(first)
    now[0] += _DAY_NS - 1
    with pytest.raises(Exhausted, match="acme has 3 keys"):
        create()
    now[0] += _DAY_NS
    with pytest.raises(Exhausted, match="acme has 2 keys"):
        create()
    database.close()


async def test_an_administrator_sees_accounts_and_plans_of_its_tenant(world: World) -> None:
    admin, other = await world.key(), await world.key("globex")
    own, others = f"keys/{admin.key.key_id}", f"keys/{other.key.key_id}"
    tokens = ("requests", "input_tokens", "output_tokens", "day_tokens", "month_tokens")
    counts = dict.fromkeys((*tokens, "minute_cost", "day_cost", "month_cost"), 5)
    adapters = [f"tenants/{tenant}/adapters/support" for tenant in ("acme", "acme-2", "globex")]
    windows = windows_at(time.time_ns() // 1_000_000)
    rows = [{"name": name, **windows, **counts} for name in (own, others, "acme", "globex", *adapters)]
    StoredAccounts(world.store._database).save(rows)
    plans: Any = plans_pb2_grpc.PlanServiceStub(world.operators)
    for name in ("default", "tenants/globex", own, others):
        await plans.SetPlan(plans_pb2.SetPlanRequest(plan=plans_pb2.Plan(name=name, tokens_per_day=9)))

    async def seen(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> tuple[list[str], list[str]]:
        accounts: Any = accounts_pb2_grpc.AccountServiceStub(channel)
        plans: Any = plans_pb2_grpc.PlanServiceStub(channel)
        listed = await accounts.ListAccounts(accounts_pb2.ListAccountsRequest(), metadata=metadata)
        named = await plans.ListPlans(plans_pb2.ListPlansRequest(), metadata=metadata)
        return [one.name for one in listed.accounts], [one.name for one in named.plans]

    assert await seen(world.tenants, world.bearer(admin)) == (["acme", own, adapters[0]], ["default", own])
    assert await seen(world.tenants, world.bearer(other)) == (
        ["globex", others, adapters[2]],
        [others, "tenants/globex"],
    )
    everything = sorted([own, others, "acme", "globex", *adapters]), sorted(["default", own, others, "tenants/globex"])
    assert await seen(world.operators, ("x-loraplex-tenant", "acme")) == everything
    with pytest.raises(grpc.aio.AioRpcError, match="role tenant-user"):
        await seen(world.tenants, world.bearer(await world.key("acme", "tenant-user")))
