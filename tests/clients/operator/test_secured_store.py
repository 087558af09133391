"""Looks at a store with credentials: tenants that it knows, a credential that it refuses, and a store that is away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from loraplex.adapter_store.app import Store as AdapterStore
from loraplex.adapter_store.app import StoreSettings
from loraplex.admin.v1 import keys_pb2, keys_pb2_grpc, plans_pb2, plans_pb2_grpc
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.operator.objects import AdapterLook, LoraAdapter
from loraplex.operator.store import Status, StoreLink
from loraplex_client import AsyncStoreClient, Tls
from tests.credentials_files import write_tls_files


@pytest.fixture
async def operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The address of a store's port for certificates, with an operator's certificate in the environment."""
    cert, key, ca = map(str, write_tls_files(tmp_path, "loraplex://store/s"))
    settings = StoreSettings(tmp_path / "data", port=0, operator_mtls_port=0, tls_cert=cert, tls_key=key, tls_ca=ca)
    store = AdapterStore(settings)
    await store.start()
    cert, key, ca = map(str, write_tls_files(tmp_path, "loraplex://operator/o"))
    for name, value in {"LORAPLEX_CA": ca, "LORAPLEX_CERT": cert, "LORAPLEX_KEY": key}.items():
        monkeypatch.setenv(name, value)
    address = dict(word.split("=") for word in store.addresses[1:])["operators-mtls"]
    base = read_base_model("hash:?vocab=600", name="base")
    async with AsyncStoreClient(address) as client:
        await client.register_model(registered(base), base.files)
    yield address
    await store.stop(0)


async def look(address: str, tenant: str = "acme") -> Status:
    """Look at an adapter whose source no store allows."""
    wanted = LoraAdapter.of("support", {"tenant": tenant, "base": "base", "source": "hf://acme/support"})
    store = StoreLink(address)
    try:
        return await AdapterLook(store, wanted, {}, True, lambda *_: None).outcome()
    finally:
        await store.close()


async def test_a_tenant_needs_a_plan_or_a_key(operators: str, tmp_path: Path) -> None:
    outcome = await look(operators)
    assert (outcome.state, outcome.reason, outcome.message) == (
        "Refused",
        "TenantUnknown",
        "spec.tenant: acme has neither a plan nor an API key; set it up: loraplex tenants create acme",
    )
    cert, key, ca = write_tls_files(tmp_path, "loraplex://operator/o")
    tls = Tls(ca, cert, key)
    async with grpc.aio.secure_channel(operators, tls.channel_credentials()) as channel:
        keys = keys_pb2_grpc.KeyServiceStub(channel)
        await keys.CreateKey(keys_pb2.CreateKeyRequest(tenant="acme"))
        assert (await look(operators)).reason == "SourceNotAllowed"
        assert (await look(operators, "globex")).reason == "TenantUnknown"
        assert (await look(operators, "shared")).reason == "SourceNotAllowed", "adapters for all tenants"
        plans = plans_pb2_grpc.PlanServiceStub(channel)
        await plans.SetPlan(plans_pb2.SetPlanRequest(plan=plans_pb2.Plan(name="tenants/globex", adapters=1)))
    outcome = await look(operators, "globex")
    assert outcome.reason == "SourceNotAllowed"
    assert "an operator allows its prefix in the file of the store's --sources" in outcome.message


async def test_a_refused_credential_and_a_store_that_is_away_are_told_apart(
    operators: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key, _ = map(str, write_tls_files(tmp_path, "loraplex://worker/w"))
    monkeypatch.setenv("LORAPLEX_CERT", cert)
    monkeypatch.setenv("LORAPLEX_KEY", key)
    outcome = await look(operators)
    assert (outcome.state, outcome.ready) == ("Refused", "False")
    assert "the operator needs an operator's API key" in outcome.message
    monkeypatch.setattr("loraplex.operator.store._ASK_S", 0.2)
    outcome = await look("127.0.0.1:1")
    assert (outcome.state, outcome.ready, outcome.stalled) == ("Unknown", "Unknown", False)
