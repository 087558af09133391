"""Grants: another tenant may use an adapter by its full name until the grant ends, and then it looks like none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.adapter_store.app import Store
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.grants import Grants
from loraplex.admin.v1 import grants_pb2, grants_pb2_grpc
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.names import AdapterName
from loraplex.runtime.rpc.errors import Exhausted

Refusal = Callable[[grpc.aio.AioRpcError], tuple[str, str, bytes]]
NAME = "tenants/acme/adapters/support"
SECOND_NS = 1_000_000_000


@pytest.fixture
async def ready(client: Any, hash_base: BaseModel) -> Any:
    """A client of a store with a base model and acme's adapter."""
    await client.register(hash_base)
    await client.upload("support", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"})
    return client


@pytest.fixture
async def granting(store: Store) -> AsyncIterator[Callable[..., Any]]:
    """`granting(method, tenant=..., **fields)`: calls GrantService."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        stub: Any = grants_pb2_grpc.GrantServiceStub(channel)

        async def call(method: str, owner: str = "acme", **fields: Any) -> Any:
            request = getattr(grants_pb2, f"{method}Request")(**fields)
            return await getattr(stub, method)(request, metadata=(("x-loraplex-tenant", owner),))

        yield call


async def names(client: Any, tenant: str) -> list[str]:
    page = await client.call("ListAdapters", pb.ListAdaptersRequest(), tenant)
    return [adapter.name for adapter in page.adapters]


async def test_a_granted_adapter_is_used_by_its_full_name(ready: Any, granting: Any, refusal: Refusal) -> None:
    async def answers() -> list[tuple[str, str, bytes]]:
        found = []
        for method, request in (
            ("GetAdapter", pb.GetAdapterRequest(name=NAME)),
            ("ListRevisions", pb.ListRevisionsRequest(parent=NAME)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ready.call(method, request, "globex")
            found.append(refusal(caught.value))
        return found

    before = await answers()
    made = await granting("CreateGrant", adapter="support", tenant="globex", ttl=Duration(seconds=3600))
    assert (made.grant.adapter, made.grant.tenant, made.grant.HasField("expire_time")) == (NAME, "globex", True)
    got = await ready.get(NAME, "globex")
    assert got.adapter.name == NAME
    assert (await ready.download(got.revision.name, "globex"))[1]["adapter_model.safetensors"] == b"weights"
    assert len((await ready.call("ListRevisions", pb.ListRevisionsRequest(parent=NAME), "globex")).revisions) == 1
    assert await names(ready, "globex") == [NAME]
    assert await names(ready, "initech") == []
    with pytest.raises(grpc.aio.AioRpcError):
        await ready.get("support", "globex")
    await granting("DeleteGrant", adapter="support", tenant="globex")
    assert await answers() == before
    assert await names(ready, "globex") == []


async def test_who_may_use_may_not_change(ready: Any, granting: Any) -> None:
    await granting("CreateGrant", adapter="support", tenant="globex")
    for method, request in (
        ("DeleteAdapter", pb.DeleteAdapterRequest(name=NAME)),
        ("SetAlias", pb.SetAliasRequest(adapter=NAME, alias="live")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ready.call(method, request, "globex")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    for method, fields in (
        ("CreateGrant", {"tenant": "initech"}),
        ("ListGrants", {}),
        ("DeleteGrant", {"tenant": "globex"}),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await granting(method, "globex", adapter=NAME, **fields)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_grants_come_in_pages_and_end_with_the_adapter(ready: Any, granting: Any) -> None:
    for tenant in ("c", "a", "b"):
        await granting("CreateGrant", adapter="support", tenant=tenant)
    first = await granting("ListGrants", adapter="support", page_size=2)
    rest = await granting("ListGrants", adapter="support", page_size=2, page_token=first.next_page_token)
    assert [grant.tenant for grant in (*first.grants, *rest.grants)] == ["a", "b", "c"]
    await ready.call("DeleteAdapter", pb.DeleteAdapterRequest(name="support"))
    await ready.upload("support", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"others"})
    assert not (await granting("ListGrants", adapter="support")).grants
    assert await names(ready, "a") == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"adapter": "support", "tenant": "acme"}, "INVALID_ARGUMENT"),
        ({"adapter": "support", "tenant": "shared"}, "INVALID_ARGUMENT"),
        ({"adapter": "support", "tenant": "A/B"}, "INVALID_ARGUMENT"),
        ({"adapter": "support", "tenant": "globex", "ttl": Duration()}, "INVALID_ARGUMENT"),
        ({"adapter": "nothing", "tenant": "globex"}, "NOT_FOUND"),
        ({"adapter": "tenants/globex/adapters/x", "tenant": "initech"}, "NOT_FOUND"),
        ({"adapter": "tenants/shared/adapters/x", "tenant": "initech"}, "FAILED_PRECONDITION"),
    ],
)
async def test_bad_grants_are_refused(ready: Any, granting: Any, fields: dict[str, Any], code: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await granting("CreateGrant", **fields)
    assert caught.value.code().name == code


async def test_a_grant_expires_and_answers_that_run_go_on_for_a_while(database: Database) -> None:
    now = [0]
    with database.transaction() as rows:
        rows.execute("INSERT INTO adapters VALUES (1, 'acme', 'support', 'base', 0, 0, 0)")
    grants, name = Grants(database, keep_s=10, clock=lambda: now[0]), AdapterName("acme", "support")
    grants.create(name, "globex", ttl_s=5)
    assert await grants.may_use(name, "globex")
    now[0] = 5 * SECOND_NS
    assert not await grants.may_use(name, "globex")
    assert await grants.may_use(name, "globex", running=True)
    assert not grants.page(name, "", 10)
    now[0] = 15 * SECOND_NS
    assert not await grants.may_use(name, "globex", running=True)
    grants.create(name, "globex", ttl_s=None)
    assert await grants.may_use(name, "globex")
    grants.end(name, "globex")
    assert not await grants.may_use(name, "globex")
    assert await grants.may_use(name, "globex", running=True)
    assert await grants.may_use(AdapterName("shared", "any"), "globex")


def test_a_tenant_makes_so_many_grants_and_those_of_long_ago_do_not_count(database: Database) -> None:
    now = [0]
    with database.transaction() as rows:
        rows.execute("INSERT INTO adapters VALUES (1, 'acme', 'support', 'base', 0, 0, 0)")
        rows.execute("INSERT INTO adapters VALUES (2, 'acme', 'sales', 'base', 0, 0, 0)")
        rows.execute("INSERT INTO adapters VALUES (3, 'initech', 'support', 'base', 0, 0, 0)")
    grants = Grants(database, keep_s=10, clock=lambda: now[0], limit=2)
    support, sales = AdapterName("acme", "support"), AdapterName("acme", "sales")
    grants.create(support, "globex", ttl_s=5)
    grants.create(sales, "globex", ttl_s=None)
    grants.create(sales, "globex", ttl_s=None)
    for name in (support, sales):
        with pytest.raises(Exhausted) as caught:
            grants.create(name, "hooli", ttl_s=None)
        assert (caught.value.reason, caught.value.subject) == ("GRANTS_FULL", "tenants/acme/grants")
    grants.create(AdapterName("initech", "support"), "globex", ttl_s=None)
    now[0] = 14 * SECOND_NS  # ended, and still kept for answers that run
    with pytest.raises(Exhausted):
        grants.create(support, "hooli", ttl_s=None)
    now[0] = 15 * SECOND_NS
    grants.create(support, "hooli", ttl_s=None)
