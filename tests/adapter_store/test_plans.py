"""Plans at a real store: operators set them, uploads keep to them, and a file takes their place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.adapter_store.plans import StoredPlans
from loraplex.admin.v1 import plans_pb2 as pb
from loraplex.admin.v1 import plans_pb2_grpc
from loraplex.contracts.artifacts.base_model import BaseModel, read_base_model
from loraplex.contracts.plans import Plan, Price, Prices
from loraplex.runtime.rpc.errors import CallError, Exhausted
from loraplex.runtime.rpc.shares import Shares

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
BYTES = sum(map(len, FILES.values()))
Refusal = Callable[[grpc.aio.AioRpcError], tuple[str, str, bytes]]


@pytest.fixture
async def plans(store: Store) -> AsyncIterator[Any]:
    """A stub of the store's PlanService."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        yield plans_pb2_grpc.PlanServiceStub(channel)


@pytest.fixture
async def ready(client: Any, hash_base: BaseModel) -> Any:
    """A client of a store with a base model."""
    await client.register(hash_base)
    return client


async def set_plan(plans: Any, name: str, **fields: Any) -> pb.Plan:
    plan: pb.Plan = (await plans.SetPlan(pb.SetPlanRequest(plan=pb.Plan(name=name, **fields)))).plan
    return plan


async def code_of(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return str(caught.value.code().name)


async def test_a_plan_s_life(plans: Any, store: Store, store_settings: StoreSettings) -> None:
    made = await set_plan(plans, "tenants/acme", tokens_per_day=0, queue_share=0.5)
    assert (await plans.GetPlan(pb.GetPlanRequest(name="tenants/acme"))).plan == made
    later = await set_plan(plans, "tenants/acme", etag=made.etag, weight=2.0)
    assert not later.HasField("tokens_per_day")
    assert await code_of(set_plan(plans, "tenants/acme", etag=made.etag)) == "ABORTED"
    await set_plan(plans, "keys/0123456789abcdef", requests_per_minute=3)
    await set_plan(plans, "default")
    page = await plans.ListPlans(pb.ListPlansRequest(page_size=2))
    assert [one.name for one in page.plans] == ["default", "keys/0123456789abcdef"]
    page = await plans.ListPlans(pb.ListPlansRequest(page_size=2, page_token=page.next_page_token))
    assert ([one.name for one in page.plans], page.next_page_token) == (["tenants/acme"], "")
    await store.stop(drain_s=0)
    await store.start()
    assert store._plans.of("acme") == Plan(weight=2.0)
    assert store._plans.get("tenants/acme").etag == later.etag


async def test_prices_are_kept_and_told_to_routers(plans: Any, store: Store) -> None:
    prices = pb.Prices(currency="EUR", of={"tiny": pb.Price(input=150, cached=75, output=600)})
    made = await set_plan(plans, "prices", prices=prices)
    (changed,) = (await plans.ListPlanChanges(pb.ListPlanChangesRequest())).plans
    assert (changed, changed.prices) == (made, prices)
    assert StoredPlans(store._database).get("prices").plan == Plan(
        prices=Prices("EUR", {"tiny": Price(input=150, cached=75, output=600)})
    )


async def test_fields_of_a_later_version_are_passed_over(plans: Any, store: Store) -> None:
    await set_plan(plans, "tenants/acme", weight=2.0)
    with store._database.transaction() as rows:
        rows.execute("UPDATE plans SET plan = ?", ('{"weight": 3.0, "tokens_per_year": 1}',))
    assert StoredPlans(store._database).of("acme") == Plan(weight=3.0)


async def test_a_deleted_plan_is_gone_and_readers_learn_it(plans: Any) -> None:
    made = await set_plan(plans, "tenants/acme", weight=2.0)
    known = await plans.ListPlanChanges(pb.ListPlanChangesRequest())
    await plans.DeletePlan(pb.DeletePlanRequest(name="tenants/acme", etag=made.etag))
    assert await code_of(plans.GetPlan(pb.GetPlanRequest(name="tenants/acme"))) == "NOT_FOUND"
    assert await code_of(plans.DeletePlan(pb.DeletePlanRequest(name="tenants/acme"))) == "NOT_FOUND"
    changes = await plans.ListPlanChanges(pb.ListPlanChangesRequest(epoch=known.epoch, after=known.latest))
    assert (list(changes.deleted), len(changes.plans)) == (["tenants/acme"], 0)
    assert (await set_plan(plans, "tenants/acme", weight=2.0)).etag != made.etag


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("acme", {}),
        ("tenants/A", {}),
        ("keys/short", {}),
        ("default", {"tokens_per_day": -1}),
        ("default", {"weight": float("nan")}),
        ("tenants/acme", {"weight": 1e-300}),
        ("keys/0123456789abcdef", {"adapters": -1}),
        ("default", {"default_model": "../x"}),
        ("default", {"budget_per_month": 10.0, "budget_warning": 20.0}),
        ("default", {"prices": pb.Prices(currency="EUR")}),
        ("prices", {"weight": 1.0}),
        ("prices", {"weight": 1.0, "prices": pb.Prices(currency="EUR")}),
        ("prices", {"prices": pb.Prices()}),
        ("prices", {"prices": pb.Prices(currency="EUR", of={"../x": pb.Price()})}),
        ("prices", {"prices": pb.Prices(currency="EUR", of={"tiny": pb.Price(input=10**9 + 1)})}),
    ],
)
async def test_a_bad_plan_is_refused(plans: Any, name: str, fields: dict[str, Any]) -> None:
    assert await code_of(set_plan(plans, name, **fields)) == "INVALID_ARGUMENT"


async def test_adapters_and_bytes_are_limited_and_freed_by_deletion(plans: Any, ready: Any, refusal: Refusal) -> None:
    await set_plan(plans, "default", adapters=2, adapter_bytes=2 * BYTES)
    for name in ("a", "b"):
        await ready.upload(name, FILES)
    for more, limit in (("c", b"adapters"), ("a", b"adapter_bytes")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ready.upload(more, {**FILES, "adapter_model.safetensors": b"others!"})
        code, kinds, raw = refusal(caught.value)
        assert (code, "QuotaFailure" in kinds) == ("RESOURCE_EXHAUSTED", True)
        assert b"tenants/acme/quotas/" + limit in raw
    await ready.upload("a", FILES, "globex")
    for name in ("c", "d", "e"):  # the default plan is not for shared adapters
        await ready.upload(name, FILES, "shared")
    await ready.call("DeleteAdapter", adapters_pb2.DeleteAdapterRequest(name="a"))
    await ready.upload("c", FILES)


async def test_deleted_adapters_are_kept_within_the_bytes_of_the_plan(plans: Any, ready: Any, data: Path) -> None:
    """Room comes back with a deletion, so that uploads and deletions in turn would fill the disk."""
    await set_plan(plans, "tenants/acme", adapter_bytes=3 * BYTES)
    revisions = []
    for number in range(6):
        files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weight%d" % number}
        revisions.append((await ready.upload("support", files)).revision.name)
        await ready.call("DeleteAdapter", adapters_pb2.DeleteAdapterRequest(name="support"))
    assert len(list((data / "blobs").iterdir())) == 1 + 3
    for name in revisions[3:]:
        assert await ready.download(name)
    assert await code_of(ready.download(revisions[2])) == "NOT_FOUND"


async def test_a_revision_beyond_the_bytes_leaves_nothing(plans: Any, ready: Any, data: Path) -> None:
    await set_plan(plans, "tenants/acme", adapter_bytes=BYTES - 1)
    assert await code_of(ready.upload("a", FILES)) == "RESOURCE_EXHAUSTED"
    assert await code_of(ready.get("a")) == "NOT_FOUND"
    assert list((data / "blobs").iterdir()) == []


async def test_an_upload_without_a_model_is_for_the_tenants_default(
    plans: Any, ready: Any, hash_base: BaseModel
) -> None:
    await ready.register(replace(read_base_model("hash:?seed=9"), name="large"))
    with pytest.raises(grpc.aio.AioRpcError, match="several base models; name one, or set default_model in a plan"):
        await ready.upload("a", FILES)
    await set_plan(plans, "default", default_model="large")
    await set_plan(plans, "tenants/acme", default_model=hash_base.name)
    uploaded = [(await ready.upload("a", FILES, tenant)).revision.base_model for tenant in ("acme", "globex", "shared")]
    assert uploaded == [hash_base.name, "large", "large"]


async def test_uploads_at_once_are_limited(plans: Any, ready: Any, store: Store, refusal: Refusal) -> None:
    await set_plan(plans, "tenants/acme", uploads_at_once=1)
    with store._receiver._quotas.uploading("acme", ""):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ready.upload("a", FILES)
        assert b"tenants/acme/quotas/uploads_at_once" in refusal(caught.value)[2]
        await ready.upload("a", FILES, "globex")
    await ready.upload("a", FILES)


async def test_uploads_at_once_are_limited_by_key_too(plans: Any, store: Store) -> None:
    await set_plan(plans, "keys/0123456789abcdef", uploads_at_once=1)
    uploading = store._receiver._quotas.uploading
    with uploading("acme", "0123456789abcdef"):
        with pytest.raises(CallError) as caught, uploading("acme", "0123456789abcdef"):
            pass
        assert isinstance(caught.value, Exhausted)
        assert caught.value.subject == "keys/0123456789abcdef/quotas/uploads_at_once"
        with uploading("acme", ""), uploading("acme", "fedcba9876543210"):
            pass
    with uploading("acme", "0123456789abcdef"):
        pass
    assert not store._receiver._quotas._uploads


async def test_a_quota_s_refusal_keeps_the_files_of_deleted_adapters(plans: Any, ready: Any, store: Store) -> None:
    await ready.upload("a", FILES)
    revision = (await ready.get("a")).revision.name
    await ready.call("DeleteAdapter", adapters_pb2.DeleteAdapterRequest(name="a"))
    await set_plan(plans, "tenants/acme", adapters=0)
    assert await code_of(ready.upload("b", FILES)) == "RESOURCE_EXHAUSTED"
    store._receiver._open_uploads._shares = Shares(0)
    assert await code_of(ready.upload("b", FILES, "globex")) == "RESOURCE_EXHAUSTED"
    assert (await ready.download(revision))[1] == FILES
