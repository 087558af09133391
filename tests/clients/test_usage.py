"""`loraplex usage` against a real store."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import grpc
from typer.testing import CliRunner

from loraplex.admin.v1 import accounts_pb2, accounts_pb2_grpc, keys_pb2, keys_pb2_grpc
from loraplex.cli.__main__ import app
from loraplex.contracts.plans import windows_at
from tests.plans_file import set_plans


async def usage(store: str, *arguments: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, ["usage", *arguments, "--store", store])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


async def test_what_is_used_of_which_limits(store: str) -> None:
    assert json.loads(await usage(store, "--json")) == []
    now = windows_at(time.time_ns() // 1_000_000)
    async with grpc.aio.insecure_channel(store) as channel:
        keys: Any = keys_pb2_grpc.KeyServiceStub(channel)
        key_id = (await keys.CreateKey(keys_pb2.CreateKeyRequest(tenant="acme", label="ci"))).key.key_id
        accounts: Any = accounts_pb2_grpc.AccountServiceStub(channel)
        # The minute of one has passed; the other windows go on for as long as the test may take.
        ahead: Any = {window: number + 1 for window, number in now.items()}
        passed: Any = {**ahead, "minute": now["minute"] - 9}
        saved = [
            accounts_pb2.Account(name="acme", requests=7, day_tokens=50, month_tokens=60, **passed),
            accounts_pb2.Account(name=f"keys/{key_id}", requests=3, output_tokens=4, day_tokens=5, **ahead),
        ]
        await accounts.SaveAccounts(accounts_pb2.SaveAccountsRequest(accounts=saved))
    await set_plans(store, f"[default]\ntokens_per_month = 900\n[keys.{key_id}]\nrequests_per_minute = 6\n")
    await set_plans(store, "[tenants.globex]\ntokens_per_day = 0\n")
    tenant, key, other = json.loads(await usage(store, "--json"))
    assert [(one["tenant"], one["key"], one["label"]) for one in (tenant, key, other)] == [
        ("acme", "", ""),
        ("acme", key_id, "ci"),
        ("globex", "", ""),
    ]
    assert tenant["counts"] == {
        "requests_per_minute": {"used": 0, "limit": None},
        "input_tokens_per_minute": {"used": 0, "limit": None},
        "output_tokens_per_minute": {"used": 0, "limit": None},
        "tokens_per_day": {"used": 50, "limit": None},
        "tokens_per_month": {"used": 60, "limit": 900},
        "budget_per_month": {"used": 0, "limit": None},
        "cost_per_minute": {"used": 0, "limit": None},
        "cost_per_day": {"used": 0, "limit": None},
    }
    assert key["counts"]["requests_per_minute"] == {"used": 3, "limit": 6}
    assert key["counts"]["output_tokens_per_minute"] == {"used": 4, "limit": None}
    assert other["counts"]["tokens_per_day"] == {"used": 0, "limit": 0}
    rows = (await usage(store, "--tenant", "acme")).splitlines()
    assert rows[0].startswith("tenant\tkey\tlabel\trequests per minute")
    assert rows[1:] == ["acme\t-\t\t0\t0\t0\t50\t60 of 900", f"acme\t{key_id}\tci\t3 of 6\t0\t4\t5\t0"]


async def test_money_is_shown_in_units_of_the_currency(store: str) -> None:
    windows: Any = {window: number + 1 for window, number in windows_at(time.time_ns() // 1_000_000).items()}
    spent: Any = {"month_cost": 12_500_000_000, "day_cost": 10_800, "minute_cost": 0}
    async with grpc.aio.insecure_channel(store) as channel:
        accounts: Any = accounts_pb2_grpc.AccountServiceStub(channel)
        saved = [accounts_pb2.Account(name="acme", **spent, **windows)]
        await accounts.SaveAccounts(accounts_pb2.SaveAccountsRequest(accounts=saved))
    await set_plans(store, "[tenants.acme]\nbudget_per_month = 80.5\n")
    (one,) = json.loads(await usage(store, "--json"))
    money = {name: one["counts"][name] for name in ("budget_per_month", "cost_per_day", "cost_per_minute")}
    assert money == {
        "budget_per_month": {"used": 12.5, "limit": 80.5},
        "cost_per_day": {"used": 0.0000108, "limit": None},
        "cost_per_minute": {"used": 0, "limit": None},
    }
    assert (await usage(store)).splitlines()[1].split("\t")[-3:] == ["12.5 of 80.5", "0", "1.08e-05"]


async def test_what_the_calls_of_adapters_used(store: str) -> None:
    windows: Any = {window: number + 1 for window, number in windows_at(time.time_ns() // 1_000_000).items()}
    async with grpc.aio.insecure_channel(store) as channel:
        accounts: Any = accounts_pb2_grpc.AccountServiceStub(channel)
        names = ("acme", "tenants/acme/adapters/org/support", "tenants/globex/adapters/b")
        saved = [accounts_pb2.Account(name=name, day_tokens=len(name), **windows) for name in names]
        await accounts.SaveAccounts(accounts_pb2.SaveAccountsRequest(accounts=saved))
    assert [one["tenant"] for one in json.loads(await usage(store, "--json"))] == ["acme"]
    found = json.loads(await usage(store, "--by-adapter", "--json"))
    assert [(one["tenant"], one["adapter"], one["counts"]["tokens_per_day"]) for one in found] == [
        ("acme", "org/support", {"used": 33, "limit": None}),
        ("globex", "b", {"used": 25, "limit": None}),
    ]
    rows = (await usage(store, "--by-adapter", "--tenant", "acme")).splitlines()
    assert rows[1:] == ["acme\torg/support\t0\t0\t0\t33\t0"]
