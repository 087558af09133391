"""Usage through a real gateway and a real store: what a tenant's administrator, its user and an operator see."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import httpx2

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.admin.v1 import accounts_pb2, accounts_pb2_grpc, keys_pb2, keys_pb2_grpc, plans_pb2, plans_pb2_grpc
from loraplex.contracts.broker import ledger
from loraplex.contracts.plans import windows_at
from loraplex.gateway.usage_api import COUNTS
from loraplex_client import Tls
from tests.clients.gateway.test_releases_api import gateway
from tests.credentials_files import write_tls_files

Http = httpx2.AsyncClient


def test_the_counts_are_those_of_the_ledger() -> None:
    assert {limit: ledger.COUNTS[limit] for limit in COUNTS} == COUNTS
    assert {limit for limit in ledger.COUNTS if "_per_" in limit} == COUNTS.keys()


async def test_each_role_sees_its_part(tmp_path: Path) -> None:
    cert, key, ca = map(str, write_tls_files(tmp_path, "loraplex://store/s"))
    settings = StoreSettings(
        tmp_path / "data", port=0, operator_port=0, operator_mtls_port=0, tls_cert=cert, tls_key=key, tls_ca=ca
    )
    store = Store(settings)
    await store.start()
    try:
        ports = dict(word.split("=") for word in store.addresses[1:])
        keys = await fill(ports["operators-mtls"], ca, tmp_path)
        async with gateway(store.addresses[0], store.addresses[0], ca=ca, operator_store=ports["operators"]) as http:
            await check_roles(http, *keys)
        async with gateway(store.addresses[0], store.addresses[0], ca=ca) as http:
            status, answer = await asked(http, "/cluster/usage", keys[2])
            assert (status, answer["error"]["code"]) == (404, "usage_not_served")
    finally:
        await store.stop(0)


async def fill(address: str, ca: str, directory: Path) -> tuple[str, str, str]:
    """Give acme a plan, a key with a plan and accounts; return keys of an administrator, a user and an operator."""
    cert, key, _ = map(str, write_tls_files(directory, "loraplex://operator/o"))
    async with grpc.aio.secure_channel(address, Tls(ca, cert, key).channel_credentials()) as channel:
        makes: Any = keys_pb2_grpc.KeyServiceStub(channel)
        asked = [("acme", "tenant-admin", "chatbot"), ("acme", "tenant-user", ""), ("", "operator", "")]
        made = [
            await makes.CreateKey(keys_pb2.CreateKeyRequest(tenant=tenant, role=role, label=label))
            for tenant, role, label in asked
        ]
        key_id = made[0].key.key_id
        plans: Any = plans_pb2_grpc.PlanServiceStub(channel)
        acme = plans_pb2.Plan(name="tenants/acme", requests_per_minute=60, tokens_per_day=1_000, budget_per_month=2.5)
        for plan in (acme, plans_pb2.Plan(name=f"keys/{key_id}", tokens_per_month=500)):
            await plans.SetPlan(plans_pb2.SetPlanRequest(plan=plan))
        now = windows_at(time.time_ns() // 1_000_000)
        past: Any = {**now, "minute": now["minute"] - 1}
        accounts = [
            accounts_pb2.Account(name="acme", **past, requests=7, day_tokens=250, month_tokens=900, month_cost=10**9),
            accounts_pb2.Account(name=f"keys/{key_id}", **past, month_tokens=400),
            accounts_pb2.Account(name="globex", **past, day_tokens=3),
            accounts_pb2.Account(name="tenants/acme/adapters/org/support", **past, day_tokens=200),
            accounts_pb2.Account(name="tenants/globex/adapters/support", **past, day_tokens=2),
        ]
    cert, key, _ = map(str, write_tls_files(directory, "loraplex://router/r"))
    async with grpc.aio.secure_channel(address, Tls(ca, cert, key).channel_credentials()) as channel:
        saves: Any = accounts_pb2_grpc.AccountServiceStub(channel)
        await saves.SaveAccounts(accounts_pb2.SaveAccountsRequest(accounts=accounts))
    return made[0].api_key, made[1].api_key, made[2].api_key


async def asked(http: Http, path: str, key: str) -> tuple[int, Any]:
    answer = await http.get(path, headers={"authorization": f"Bearer {key}"})
    return answer.status_code, answer.json()


async def check_roles(http: Http, admin: str, user: str, operator: str) -> None:
    status, own = await asked(http, "/v1/usage?tenant=acme", admin)
    assert status == 200
    assert own["tenants"] == ["acme"]
    whole, chatbot, adapter = own["usage"]
    assert (adapter["adapter"], adapter["counts"]["tokens_per_day"]) == ("org/support", {"used": 200, "limit": None})
    assert (whole["tenant"], whole["key"], chatbot["label"]) == ("acme", "", "chatbot")
    # The requests were those of the minute before.
    assert whole["counts"]["requests_per_minute"] == {"used": 0, "limit": 60}
    assert whole["counts"]["tokens_per_day"] == {"used": 250, "limit": 1_000}
    assert whole["counts"]["tokens_per_month"] == {"used": 900, "limit": None}
    assert whole["counts"]["budget_per_month"] == {"used": 1.0, "limit": 2.5}
    assert chatbot["counts"]["tokens_per_month"] == {"used": 400, "limit": 500}
    status, refused = await asked(http, "/v1/usage", user)
    assert (status, refused["error"]["code"]) == (403, "role_not_permitted")
    assert (await asked(http, "/cluster/usage", admin))[0] == 403
    status, every = await asked(http, "/cluster/usage", operator)
    assert status == 200
    assert every["tenants"] == ["acme", "globex"]
    assert [(row["tenant"], row["key"]) for row in every["usage"]] == [("acme", ""), ("globex", "")]
    assert (await asked(http, "/cluster/usage?tenant=acme", operator))[1]["usage"] == own["usage"]
