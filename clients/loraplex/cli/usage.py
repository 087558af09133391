"""`loraplex usage`: what tenants and API keys have used of their plans this minute, day and month."""

from __future__ import annotations

import time
from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.options import STORE, JsonOption, StoreOption
from loraplex.cli.service import Service
from loraplex.cli.terminal import print_json, print_rows
from loraplex.cli.usage_report import report
from loraplex.contracts.plans import BUDGET_FIELDS, DEFAULT, FIELDS, NANO, PRICES, plan_name, windows_at

if TYPE_CHECKING:
    from loraplex.admin.v1 import accounts_pb2, plans_pb2


# The tokens, requests or money `used` in a limit's window, and the `limit`; None for no limit.
Count = dict[str, float | None]
# Counts without a limit; costs are in units of the currency.
_COSTS = {"cost_per_minute": "minute_cost", "cost_per_day": "day_cost"}
_MONEY = {*_COSTS, *BUDGET_FIELDS}


usage = typer.Typer(invoke_without_command=True)
usage.command("report")(report)


@usage.callback()
def show(
    context: typer.Context,
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Only this tenant and its keys.")] = "",
    by_adapter: Annotated[bool, typer.Option("--by-adapter", help="Show what calls of each adapter used.")] = False,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Show what tenants and API keys have used this minute, day and month, of which limits.

    Operators and auditors see all tenants, a tenant's administrator its own. Counted are tenants and keys whose plans
    have limits, and all tenants where routers write usage events. The store knows them up to a second late.

    [bold]loraplex usage --tenant acme[/]
    """
    if context.invoked_subcommand is not None:
        return
    found = read_usage(store, tenant, by_adapter=by_adapter)
    if as_json:
        print_json(found)
        return
    has_money = any(any(one["counts"]["budget_per_month"].values()) for one in found)
    limits = [limit for limit in (found[0]["counts"] if found else ()) if has_money or limit not in _MONEY]
    names = ("tenant", "adapter") if by_adapter else ("tenant", "key", "label")
    rows = [[_name(one, name) for name in names] + [_cell(one["counts"][limit]) for limit in limits] for one in found]
    print_rows((*names, *(limit.replace("_", " ") for limit in limits)), rows)


def read_usage(store: str, tenant: str = "", *, by_adapter: bool = False) -> list[dict[str, Any]]:
    """Return tenant, key, label and counts of each account and plan that the caller sees, or of one tenant.

    With `by_adapter` tenant, adapter and counts of each adapter. Raises CommandError.
    """
    listed = Service("store", store, "admin.v1.accounts").list("ListAccounts", "accounts")
    if by_adapter:
        of_adapters = {tuple(one.name.split("/", 3)[1::2]): one for one in listed if one.name.startswith("tenants/")}
        return [
            {"tenant": owner, "adapter": adapter, "counts": _counts(account, None)}
            for (owner, adapter), account in sorted(of_adapters.items())
            if tenant in {"", owner}
        ]
    accounts = {one.name: one for one in listed if not one.name.startswith("tenants/")}
    plans = {one.name: one for one in Service("store", store, "admin.v1.plans").list("ListPlans", "plans")}
    keys = {one.key_id: one for one in Service("store", store, "admin.v1.keys").list("ListKeys", "keys")}
    names = {*accounts, *(name.removeprefix("tenants/") for name in plans if name not in {DEFAULT, PRICES})}
    found = []
    for name in names:
        key_id = name.removeprefix("keys/") if name.startswith("keys/") else ""
        owner, label = (key.tenant, key.label) if (key := keys.get(key_id)) else ("" if key_id else name, "")
        plan = plans.get(plan_name(name, key_id)) or (None if key_id else plans.get(DEFAULT))
        if tenant in {"", owner}:
            counts = _counts(accounts.get(name), plan)
            found.append({"tenant": owner, "key": key_id, "label": label, "counts": counts})
    return sorted(found, key=itemgetter("tenant", "key"))


def _counts(account: accounts_pb2.Account | None, plan: plans_pb2.Plan | None) -> dict[str, Count]:
    from loraplex.contracts.broker.ledger import COUNTS

    now, counts = windows_at(time.time_ns() // 1_000_000), dict[str, Count]()
    for limit, field in {**COUNTS, **_COSTS}.items():
        window = limit.rpartition("_per_")[2]
        if window in now:  # the store does not know of open streams
            is_current = account is not None and getattr(account, window) >= now[window]
            is_limited = plan is not None and limit in FIELDS and plan.HasField(limit)  # type: ignore[arg-type]
            used = getattr(account, field) if is_current else 0
            counts[limit] = {
                "used": used / NANO if limit in _MONEY else used,
                "limit": getattr(plan, limit) if is_limited else None,
            }
    return counts


def _name(found: Mapping[str, Any], field: str) -> str:
    return found[field] or ("" if field == "label" else "-")


def _cell(count: Count) -> str:
    used, limit = (f"{one:.9g}" if isinstance(one, float) else str(one) for one in count.values())
    return used if count["limit"] is None else f"{used} of {limit}"
