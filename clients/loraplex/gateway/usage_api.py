"""Answers with the usage of tenants and API keys, from the store's accounts, as `loraplex usage` shows it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from loraplex.admin.v1 import accounts_pb2, keys_pb2, plans_pb2
from loraplex.gateway.adapters_api import read_query
from loraplex.gateway.endpoint import HttpCall
from loraplex_client.calls import Call, Script
from loraplex_client.connection import AsyncConnection

# The account's field of each count, by the name of the plan's limit; costs have none.
COUNTS = {
    "requests_per_minute": "requests",
    "input_tokens_per_minute": "input_tokens",
    "output_tokens_per_minute": "output_tokens",
    "tokens_per_day": "day_tokens",
    "tokens_per_month": "month_tokens",
    "budget_per_month": "month_cost",
}
_MONEY, _NANO = "budget_per_month", 10**9
# Entries of one call to the store; and timeout in seconds of each, where the client gives no deadline.
_PAGE, _STORE_S = 1_000, 10.0
_HEADERS = (("cache-control", "no-store"),)
Messages = Mapping[str, Any]


async def show_usage(call: HttpCall) -> None:
    """Answer with what the caller's tenant and its keys have used. Raises HttpError, LoraplexError."""
    await _answer(call, call.cluster.usage(call.exchange.headers))


async def show_all_usage(call: HttpCall) -> None:
    """Answer with what all tenants have used, or one with its keys, to an operator. Raises HttpError, LoraplexError."""
    await _answer(call, call.cluster.all_usage(call.exchange.headers))


async def _answer(call: HttpCall, store: AsyncConnection) -> None:
    tenant = read_query(call, ("tenant",)).get("tenant", "")
    timeout_s = call.timeout_s or _STORE_S
    accounts = await store.run(_listed("ListAccounts", accounts_pb2.ListAccountsRequest, "accounts", timeout_s))
    plans = await store.run(_listed("ListPlans", plans_pb2.ListPlansRequest, "plans", timeout_s))
    keys = await store.run(_listed("ListKeys", keys_pb2.ListKeysRequest, "keys", timeout_s))
    size = len(accounts) + len(plans) + len(keys)
    rows = await call.run(size, lambda: usage_of(accounts, plans, keys, tenant, time.time()))
    await call.exchange.answer(rows, headers=_HEADERS)


def _listed(method: str, kind: Any, field: str, timeout_s: float) -> Script[list[Any]]:
    """Return all entries of a list."""
    found, token = list[Any](), ""
    while True:
        page = yield Call(method, kind(page_size=_PAGE, page_token=token), timeout_s=timeout_s)
        found += getattr(page, field)
        token = page.next_page_token
        if not token:
            return found


def usage_of(
    accounts: Iterable[Any], plans: Iterable[Any], keys: Iterable[Any], tenant: str, now_s: float
) -> dict[str, Any]:
    """Return the names of all tenants, and each count of a tenant, its keys and adapters, or of all tenants."""
    by_name: Messages = {one.name: one for one in accounts}
    limits: Messages = {one.name: one for one in plans}
    owners: Messages = {one.key_id: one for one in keys}
    named = (name.removeprefix("tenants/") for name in limits if name.startswith(("tenants/", "keys/")))
    rows, tenants = list[dict[str, Any]](), set[str]()
    for name in {*by_name, *named}:
        if name.startswith("tenants/"):  # an adapter's
            _, owner, _, adapter = name.split("/", 3)
            if owner == tenant:
                counts = _counts(by_name[name], None, now_s)
                rows.append({"tenant": owner, "key": "", "label": "", "adapter": adapter, "counts": counts})
            continue
        key_id = name.removeprefix("keys/") if name.startswith("keys/") else ""
        key = owners.get(key_id)
        owner, label = (key.tenant, key.label) if key else ("" if key_id else name, "")
        tenants |= {owner} - {""}
        if (owner == tenant) if tenant else not key_id:
            plan = limits.get(name if key_id else f"tenants/{name}") or (None if key_id else limits.get("default"))
            counts = _counts(by_name.get(name), plan, now_s)
            rows.append({"tenant": owner, "key": key_id, "label": label, "counts": counts})
    rows.sort(key=lambda row: (row["tenant"], row.get("adapter", ""), row["key"]))
    return {"tenants": sorted(tenants), "usage": rows}


def _counts(account: Any, plan: Any, now_s: float) -> dict[str, dict[str, float | None]]:
    """Return what is used in the current windows, and the limits; None for no limit."""
    day = datetime.fromtimestamp(now_s, UTC)
    windows = {"minute": int(now_s) // 60, "day": int(now_s) // 86_400, "month": 12 * day.year + day.month - 1}
    counts: dict[str, dict[str, float | None]] = {}
    for limit, field in COUNTS.items():
        window = limit.rpartition("_per_")[2]
        is_current = account is not None and getattr(account, window) >= windows[window]
        used = getattr(account, field) if is_current else 0
        most = getattr(plan, limit) if plan is not None and plan.HasField(limit) else None
        counts[limit] = {"used": used / _NANO if limit == _MONEY else used, "limit": most}
    return counts
