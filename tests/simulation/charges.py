"""Watches the ledger for the design's invariant 8: what tenants were granted, and what each request was charged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from loraplex.contracts.broker.keys import key_account
from loraplex.contracts.broker.terms import HELD_MS, RECOVERY_MS
from loraplex.contracts.plans import Price, money
from loraplex.router.quotas.plans import Plans
from loraplex.router.quotas.quotas import RENEW_S
from tests.simulation.faults import Fault, Kind
from tests.simulation.loop import Node
from tests.simulation.redis import SimulatedRedis, UsageEvent
from tests.simulation.router import STOP_S
from tests.simulation.stories import End, Plan, Story, asked_tokens

TENANTS = ("one", "two", "three")
# Name of the base model.
BASE = "hash"
# Faults in which no router reaches Redis, or tells it in time what it knows.
_AWAY = frozenset({Kind.REDIS_DOWN, Kind.REDIS_HANG, Kind.REDIS_SLOW})
# Maximum time in seconds between two reports of a router that runs and reaches Redis: the interval of its renewals, and
# their time on the network.
_REPORT_S = RENEW_S + 0.2


def draw_keys(chance: Random, plans: Sequence[Plan]) -> list[Plan]:
    """Let requests come with an API key, one of two of their tenants, or without; in half of all scenarios."""
    if chance.random() < 0.5:
        return list(plans)
    return [replace(plan, key=chance.choice(("", *_keys_of(plan.request.tenant)))) for plan in plans]


def _keys_of(tenant: str) -> tuple[str, str]:
    return f"{tenant}-first", f"{tenant}-second"


def draw_prices(own: Random) -> dict[str, tuple[int, int, int]]:
    """Return prices of the base model and of adapters, in nano-units of a token; none in half of all scenarios."""
    prices: dict[str, tuple[int, int, int]] = {}
    for name in (BASE, *(f"tenants/one/adapters/{adapter}@1" for adapter in "ab")) * (own.random() < 0.5):
        if own.random() < 0.8:
            whole = own.choice((0, 150, 999_999_999))
            prices[name] = whole, own.choice((whole, whole // 2, 0)), own.choice((0, 600, 1_000_000_000))
    return prices


def draw_quotas(chance: Random, plans: Sequence[Plan]) -> str:
    """Return a plans file: of each tenant a limit or two, which its requests may reach or not, and of some keys; and
    prices with budgets.
    """
    # Of its own chance, so that older seeds draw what they drew before there were prices.
    own = Random(f"prices {[plan.request.prompt for plan in plans]}")
    prices = draw_prices(own)
    dearest = max((max(price) for price in prices.values()), default=0)
    lines = ["[prices]", *(f'"{name}" = {list(price)}' for name, price in prices.items())] if prices else []
    default = Random(f"default {chance.random()}").choice(TENANTS)  # has no plan of its own, in half of all scenarios
    for tenant in TENANTS:
        wanted = [asked_tokens(plan) for plan in plans if plan.request.tenant == tenant] or [1]
        tokens = max(*wanted, round(sum(wanted) * chance.choice((0.3, 0.7, 2.0))), 1)
        is_default = tenant == default and tokens % 2
        lines += ["[default]" if is_default else f"[tenants.{tenant}]", f"tokens_per_day = {tokens}"]
        if dearest and own.random() < 0.5:
            lines += _budgets(dearest * max(*wanted, round(sum(wanted) * own.choice((0.3, 0.7, 2.0)))))
        if chance.random() < 0.15:
            lines.append(f"concurrent_streams = {chance.randint(1, 4)}")
        if chance.random() < 0.15:
            lines.append(f"requests_per_minute = {chance.randint(1, 12)}")
    for key in sorted({plan.key for plan in plans if plan.key}):
        wanted = [asked_tokens(plan) for plan in plans if plan.key == key]
        lines.append(f"[keys.{key}]")
        if chance.random() < 0.75:  # else the key has no account
            tokens = max(*wanted, 1, round(sum(wanted) * chance.choice((0.3, 0.7, 2.0))))
            lines.append(f"tokens_per_day = {tokens}")
            if dearest and own.random() < 0.5:
                lines += _budgets(dearest * tokens)
        queue = Random(f"queue of {key} {wanted}")  # another one leaves the rest as it is
        if queue.random() < 0.6:
            lines.append(f"weight = {queue.choice((0.3, 1, 2, 5))}")
        if queue.random() < 0.3:
            lines.append(f"queue_share = {queue.choice((0.0001, 0.5))}")
    return "\n".join(lines)


def _budgets(nanos: int) -> list[str]:
    """Return lines of a budget in units of the currency, and of the half of it from which answers warn."""
    return [f"budget_per_month = {money(nanos)}", f"budget_warning = {money(nanos // 2)}"]


def accounts_of(plan: Plan) -> list[str]:
    """Return the names of the accounts in which a request may be reserved: its tenant's and its key's."""
    return [plan.request.tenant, *([key_account(plan.key)] if plan.key else [])]


def cost_of(event: UsageEvent, price: Price) -> int:
    """Return what the tokens of an event cost, in nano-units of the currency."""
    computed = event.input - event.cached
    return computed * price.input + event.cached * price.cached + event.output * price.output


class Charges:
    """Compares what clients got with quotas and accounts, at the end of a run within one day."""

    def __init__(self, redis: SimulatedRedis, plans: Plans, faults: Sequence[Fault]) -> None:
        self._redis = redis
        self._plans = plans
        self._faults = faults

    def check(self, stories: Sequence[Story]) -> list[str]:
        """Return what is wrong."""
        wrong: list[str] = []
        for account in sorted({*self._plans.accounts, *TENANTS}):
            own = [story for story in stories if account in accounts_of(story.plan)]
            got, limits = sum(story.received_tokens for story in own), self._plans.limits_of(account)
            if not limits:
                continue
            most = limits["tokens_per_day"]
            untold, bound = sum(self._untold(story, account) for story in own), self._bound(account)
            untold += self._stopped(account)
            if got > most + untold + bound:
                wrong.append(f"{account} got {got} tokens, its quota is {most}")
            counts = self._redis.look(account)
            charged, cost = counts.get("day_tokens", 0), counts.get("month_cost", 0)
            self._redis.read_usage()
            events = [event for event in self._redis.events.values() if account in event.accounts]
            in_events = sum(event.tokens for event in events)
            if abs(charged - in_events) > bound:
                wrong.append(f"{account} was charged {charged} tokens, its events have {in_events}")
            prices = [self._plans.price_of(event.model, event.revision)[1] for event in events]
            dearest = max((max(price.input, price.output) for price in prices), default=0)
            if abs(cost - (of_events := sum(event.cost for event in events))) > bound * dearest:
                wrong.append(f"{account} was charged {money(cost)}, its events have {money(of_events)}")
            due = sum(cost_of(event, price) for event, price in zip(events, prices, strict=True))
            if of_events != due:
                wrong.append(f"the events of {account} have {money(of_events)}, their tokens cost {money(due)}")
            budget, least_cost = limits.get("budget_per_month"), sum(map(self._least_cost, own))
            if budget is not None and least_cost > budget + (untold + bound) * dearest:
                wrong.append(f"{account} got tokens for {money(least_cost)}, its budget is {money(budget)}")
            least, largest = got - untold - bound, bound + sum(map(self._chargeable, own))
            if not least <= charged <= largest:
                wrong.append(f"{account} was charged {charged} tokens, {least} to {largest} are due")
        return wrong

    def _least_cost(self, story: Story) -> int:
        """Return the least that the client's tokens may have cost: all of a prompt may have been cached."""
        adapter = story.plan.request.adapter
        _, price = self._plans.price_of(BASE, f"tenants/one/adapters/{adapter}@1" if adapter else "")
        return story.received_tokens * min(price.cached, price.output)

    def _untold(self, story: Story, account: str) -> int:
        """Return the tokens that routers of the request, which died, may have sent after their last report.

        A resume tells of them, unless the reservation has ended before it.
        """
        untold, next_s = 0, math.inf
        for held in reversed(story.held.get(account, [])):
            died_s = held.router.died_at
            if died_s is not None and next_s >= died_s - _REPORT_S + HELD_MS / 1e3:
                told_s = self._redis.told_s.get((held.router, held.id), 0.0)
                since_s = max(told_s, self._reported_until(held.router))
                untold += sum(tokens for sent_s, tokens in story.sent if since_s <= sent_s < next_s)
            next_s = held.granted_s
        return untold

    def _stopped(self, account: str) -> int:
        """Return what routers had reserved that stood still until others ended their reservations.

        A call that a router sent before may reserve while it stands still, if Redis hangs.
        """
        stops = {f"router-{fault.router}": fault for fault in self._faults if fault.kind is Kind.ROUTER_HANG}
        return sum(
            amount
            for of, ms, amount, router in self._redis.granted
            if of == account and router in stops and stops[router].length_s > HELD_MS / 1e3 - _REPORT_S
            if ms <= self._redis.ms_of(stops[router].at_s + stops[router].length_s)
        )

    def _reported_until(self, router: Node) -> float:
        """Return the time up to which a router that died must have reported what it sent: a second before its death.

        While Redis was away, or the router stood still, there were no reports.
        """
        assert router.died_at is not None
        until_s = router.died_at - _REPORT_S
        silences = [
            (fault.at_s + fault.length_s, fault.at_s)
            for fault in self._faults
            if fault.kind in (Kind.REDIS_DOWN, Kind.REDIS_HANG)
            or (fault.kind is Kind.ROUTER_HANG and router.name == f"router-{fault.router}")
        ]
        for end_s, start_s in sorted(silences, reverse=True):
            if end_s > until_s and start_s < router.died_at:
                until_s = min(until_s, start_s - _REPORT_S)
        return until_s

    def _bound(self, account: str) -> int:
        """Return how much more than its quota a tenant or key may get: docs/guides/quotas.md."""
        return sum(
            amount
            for since_ms, at_ms in self._redis.losses
            for of, ms, amount, router in self._redis.granted
            if of == account
            # A replica that lags has not what was granted since, and grants until a router finds that out.
            and (since_ms <= ms <= at_ms + _REPORT_S * 1e3 * (since_ms < at_ms) or self._is_silent(router, at_ms))
        )

    def _is_silent(self, router: str, lost_ms: int) -> bool:
        """Tell whether a router may not tell what it knows of a ledger that loses its data at a time.

        What a router charged in the second before its death is in no store. One that is away keeps the ledger closed.
        """
        at_s = (lost_ms - self._redis.ms_of(0.0)) / 1e3
        away = [fault for fault in self._faults if fault.kind is Kind.STORE_AWAY]
        until_s = max(at_s, *(fault.at_s + fault.length_s for fault in away), 0.0) + RECOVERY_MS / 1e3 + _REPORT_S
        since_s = min(at_s, *(fault.at_s for fault in away), at_s) - _REPORT_S
        for fault in self._faults:
            end_s = fault.at_s + fault.length_s
            if fault.kind in _AWAY and fault.at_s <= until_s and end_s >= since_s:
                return True
            if router == f"router-{fault.router}":
                if fault.kind is Kind.ROUTER_KILL and fault.at_s <= until_s:
                    return True
                end_s += STOP_S * (fault.kind is Kind.ROUTER_DRAIN)
                is_busy = fault.kind in {Kind.ROUTER_HANG, Kind.ROUTER_DRAIN}
                if is_busy and fault.at_s <= until_s and end_s >= since_s:
                    return True
        return False

    def _chargeable(self, story: Story) -> int:
        """Return the most that a request may be charged.

        What was computed for a client that left counts too, and what a router had charged for a call before its client
        got anything of it, and it was made again: one that died with what it had sent.
        Of candidates that are ranked a client has nothing before the end: a resume makes them again.
        """
        asked, request = asked_tokens(story.plan), story.plan.request
        once = story.received_tokens if story.ends in ([End.COMPLETED], [End.REFUSED]) else asked
        remade = story.resumes if request.best_of > request.n else 0
        return once + (remade + story.repeats) * asked
