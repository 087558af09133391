"""A router's copy of the plans, against a real store: it follows changes, and begins anew with another store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.contracts.plans import Plan
from loraplex.router.catalog.store_client import StoreClient
from loraplex.router.quotas.plans import Plans
from loraplex.runtime.rpc.errors import Unavailable


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    """A running store."""
    running = Store(StoreSettings(data=tmp_path / "data", port=0))
    await running.start()
    yield running
    await running.stop(drain_s=0)


async def test_the_copy_follows_the_store(store: Store) -> None:
    client = StoreClient(f"127.0.0.1:{store.port}")
    plans = Plans(client)
    with pytest.raises(Unavailable):
        plans.owners("acme", "")
    await plans.look()
    assert plans.limits_of("acme") == {}
    set_plan = store._plans.set
    set_plan("tenants/acme", Plan(tokens_per_day=0, weight=2.0), "")
    set_plan("keys/0123456789abcdef", Plan(requests_per_minute=1), "")
    await plans.look()
    assert [plans.weight_of(tenant) for tenant in ("acme", "old")] == [2.0, 1.0]
    assert plans.limits_of("acme") == {"tokens_per_day": 0}
    assert plans.owners("acme", "0123456789abcdef")[0].name == "keys/0123456789abcdef"
    set_plan("tenants/acme", None, "")
    await plans.look()
    assert (plans.limits_of("acme"), list(plans.accounts)) == ({}, ["keys/0123456789abcdef"])
    store._plans.epoch = "another store, without plans"
    store._plans._plans = {}
    await plans.look()
    assert list(plans.accounts) == []
    await client.close()


async def test_a_purge_during_an_answer_leaves_the_plans_of_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = StoreClient(f"127.0.0.1:{store.port}")
    plans, stored = Plans(client), store._plans
    for tenant in ("globex", "acme"):
        stored.set(f"tenants/{tenant}", Plan(tokens_per_day=5), "")
    await plans.look()
    read = stored.changes

    def purged_then_read(after: int, limit: int) -> Any:
        stored.purge(["tenants/globex"])
        return read(after, limit)

    with monkeypatch.context() as during:
        during.setattr(stored, "changes", purged_then_read)
        await plans.look()
    assert plans.limits_of("acme") == {"tokens_per_day": 5}
    await plans.look()
    assert (plans.limits_of("acme"), plans.limits_of("globex")) == ({"tokens_per_day": 5}, {})
    await client.close()


async def test_a_store_that_does_not_answer_leaves_the_plans(store: Store) -> None:
    client = StoreClient(f"127.0.0.1:{store.port}")
    plans = Plans(client)
    store._plans.set("default", Plan(tokens_per_day=5), "")
    await plans.look()
    await store.stop(drain_s=0)
    await plans.look()
    assert plans.limits_of("acme") == {"tokens_per_day": 5}
    await store.start()
    await client.close()
