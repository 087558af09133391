"""Events of budgets, for webhooks: an account has reached its warning, or a call was refused by its budget.

    save of a router's accounts ──▶ `note` ──▶ budget_events, once a month of an account and kind ──▶ webhooks

An event is noted before the account is saved, so that none is missing where a store dies between the two: the router
saves again. Stores that share a catalog share its events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from loraplex.adapter_store.database import Database
from loraplex.adapter_store.plans import StoredPlans
from loraplex.contracts.plans import PRICES, money, nano, windows_at
from loraplex.runtime.rpc.errors import NotFound

# Kinds of events, with the field of the plan that each is of.
WARNED, SPENT = "warned", "spent"
_FIELDS = {WARNED: "budget_warning", SPENT: "budget_per_month"}


class BudgetEvents:
    """Notes the events. Its calls block: make them in a thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # Account, month and kind of the events of this month that are noted, so that no save of a second looks again.
        self._noted = set[tuple[str, int, str]]()

    def note(self, plans: StoredPlans, accounts: Sequence[Mapping[str, Any]], spent: Collection[str]) -> None:
        """Note the events of accounts that are saved, and of those whose budget has refused a call.

        Raises Exhausted on a full disk.
        """
        now = windows_at(time.time_ns() // 1_000_000)["month"]
        found = [(str(one["name"]), int(one["month"]), WARNED, int(one["month_cost"])) for one in accounts]
        found += [(name, now, SPENT, 0) for name in spent]
        events = []
        for name, month, kind, cost in found:
            if (name, month, kind) in self._noted or month < now or name.startswith("tenants/"):  # an adapter's
                continue
            plan = plans.of_key(name.removeprefix("keys/")) if name.startswith("keys/") else plans.of(name)
            limit = getattr(plan, _FIELDS[kind])
            if limit is not None and (kind == SPENT or cost >= nano(limit)):
                events.append((name, month, kind, nano(limit)))
        if events:
            self._add(events, _currency(plans), now)

    def _add(self, events: Sequence[tuple[str, int, str, int]], currency: str, now: int) -> None:
        with self._database.transaction() as rows:
            rows.execute("DELETE FROM budget_events WHERE month < ?", (now - 1,))
            for name, month, kind, limit in events:
                key_id = name.removeprefix("keys/") if name.startswith("keys/") else ""
                owner = rows.execute("SELECT tenant FROM api_keys WHERE key_id = ?", (key_id,)).fetchone()
                record = {
                    "tenant": (owner["tenant"] if owner else "") if key_id else name,
                    "key": key_id,
                    "month": f"{month // 12}-{month % 12 + 1:02}",
                    _FIELDS[kind]: money(limit),
                    "currency": currency,
                }
                event = {"time": datetime.now(UTC).isoformat(), "data": record}
                rows.execute(
                    "INSERT INTO budget_events (account, month, kind, record) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT DO NOTHING",
                    (name, month, kind, json.dumps(event)),
                )
        self._noted = {one for one in self._noted if one[1] >= now} | {event[:3] for event in events}


def _currency(plans: StoredPlans) -> str:
    """Return the currency of the prices; empty where there are none any more."""
    try:
        plan = plans.get(PRICES).plan
    except NotFound:
        return ""
    return plan.prices.currency if plan is not None and plan.prices is not None else ""
