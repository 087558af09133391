"""Quotas in virtual time: routers die and Redis loses its data; nobody gets more, and each token is charged once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from loraplex.contracts.broker.keys import key_account
from loraplex.contracts.broker.ledger import Counts, Ledger, Reservation
from loraplex.contracts.plans import money
from tests.hash_answers import expected_scores
from tests.simulation.faults import Fault, Kind
from tests.simulation.queue import break_library
from tests.simulation.redis import SimulatedRedis
from tests.simulation.run import Outcome, simulate_scenario
from tests.simulation.scenario import MODEL, draw
from tests.simulation.stories import End, asked_tokens
from tests.simulation.test_cut_links import plan


def run(quota: int, requests: int, rate: float, max_tokens: int, faults: Sequence[Fault], key: str = "") -> Outcome:
    """Run requests of the tenant `one`, so many a second from 1 s on, at three routers.

    With a key the quota is the key's, and the tenant's is more than they ask for.
    """
    plans = tuple(
        replace(plan(number, 1.0 + number / rate, max_tokens), router=number % 3, key=key) for number in range(requests)
    )
    cluster = {"workers": 3, "routers": 3, "rows": 8, "kv_blocks": 400, "backlog": False}
    quotas = f"[keys.{key}]\ntokens_per_day = {quota}\n" if key else ""
    quotas += f"[tenants.one]\ntokens_per_day = {100 * quota if key else quota}\n"
    return simulate_scenario(replace(draw(0), plans=plans, faults=tuple(faults), quotas=quotas, **cluster))  # type: ignore[arg-type]


KILLS = [Fault(Kind.ROUTER_KILL, at_s, 0.5, 0, router) for router, at_s in enumerate((1.9, 3.3, 4.6))]


@pytest.mark.parametrize("key", ["", "k"])
def test_a_tenant_or_key_at_ten_times_its_quota_gets_it_and_no_more(key: str) -> None:
    size = asked_tokens(plan(0, 0.0, 20))
    lost = [*KILLS[:1], Fault(Kind.REDIS_WIPE, 3.0, 0.0, 0, 0), Fault(Kind.REDIS_WIPE, 5.2, 0.0, 0, 0)]
    outcome = run(size * 20, 200, 40.0, 20, lost, key)
    assert not outcome.wrong, str(outcome)
    granted = size * outcome.ends[End.COMPLETED]
    assert 0.98 * size * 20 <= granted <= size * 20
    assert outcome.ends[End.REFUSED] == 180


def test_requests_that_routers_leave_are_charged_once() -> None:
    outcome = run(100_000, 32, 8.0, 40, KILLS, "k")
    assert not outcome.wrong, str(outcome)
    assert outcome.ends == {End.COMPLETED: 32}
    assert outcome.resumes > 5


def test_accounts_that_nobody_puts_back_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fill, load = Ledger.fill, Ledger.load

    async def fill_nothing(ledger: Ledger, reservations: Sequence[Reservation], *, closes: bool) -> None:
        ledger.unsaved.clear()
        ledger._recent.clear()
        await fill(ledger, reservations, closes=closes)

    async def load_nothing(ledger: Ledger, saved: Sequence[Counts]) -> None:
        await load(ledger, [])

    monkeypatch.setattr(Ledger, "fill", fill_nothing)
    monkeypatch.setattr(Ledger, "load", load_nothing)
    size = asked_tokens(plan(0, 0.0, 20))
    outcome = run(size * 20, 200, 40.0, 20, [Fault(Kind.REDIS_WIPE, 3.0, 0.0, 0, 0)], "k")
    assert any(f"{key_account('k')} got" in line and "tokens, its quota is" in line for line in outcome.wrong)


def test_requests_that_are_charged_again_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Ledger.reserve

    async def as_a_new_one(ledger: Ledger, wanted: Reservation, received: object, *rest: Any) -> Reservation:
        if received is not None:
            wanted.id = f"{wanted.id} again"
        return await reserve(ledger, wanted, None, *rest)

    monkeypatch.setattr(Ledger, "reserve", as_a_new_one)
    wrong = run(100_000, 32, 8.0, 40, KILLS, "k").wrong
    assert {line.split()[0] for line in wrong if "was charged" in line} == {"one", key_account("k")}


def test_a_score_that_its_router_charged_and_did_not_deliver_may_be_charged_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settled_s = list[float]()

    def told(name: str, message: Mapping[str, Any]) -> None:
        if name == "ledger_tell" and any(not one["open"] for one in message["reservations"]):
            settled_s.append(asyncio.get_running_loop().time())

    monkeypatch.setattr(SimulatedRedis, "told", staticmethod(told))
    scores = replace(plan(0, 1.0, 1), scores=expected_scores(MODEL, (0,), [(1, 2)]))
    scenario = replace(draw(0), plans=(scores,), faults=(), routers=1, quotas="[tenants.one]\ntokens_per_day = 100\n")
    assert not simulate_scenario(scenario).wrong
    kill = Fault(Kind.ROUTER_KILL, settled_s[-1] + 1e-4, 0.5, 0, 0)
    outcome = simulate_scenario(replace(scenario, faults=(kill,)))
    assert len(settled_s) >= 2
    assert outcome.ends == {End.COMPLETED: 1}
    assert not outcome.wrong, str(outcome)


def run_with_a_budget(faults: Sequence[Fault] = ()) -> Outcome:
    """Run 60 requests whose prompts and tokens have prices, with a budget for 20 of them at the most."""
    plans = tuple(replace(plan(number, 1.0 + number / 20, 20), router=number % 3) for number in range(60))
    cluster = {"workers": 3, "routers": 3, "rows": 8, "kv_blocks": 400, "backlog": False}
    budget = money(20 * asked_tokens(plans[0]) * 600)
    quotas = f"[prices]\nhash = [600, 600, 600]\n[tenants.one]\ntokens_per_day = 100000\nbudget_per_month = {budget}\n"
    return simulate_scenario(replace(draw(0), plans=plans, faults=tuple(faults), quotas=quotas, **cluster))  # type: ignore[arg-type]


@pytest.mark.parametrize("faults", [(), KILLS, [Fault(Kind.REDIS_WIPE, 2.0, 0.0, 0, 0)]])
def test_a_budget_is_held_and_events_have_what_is_charged(faults: Sequence[Fault]) -> None:
    outcome = run_with_a_budget(faults)
    assert not outcome.wrong, str(outcome)
    assert outcome.ends[End.REFUSED] > 20
    assert outcome.ends[End.COMPLETED] >= 20


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("numbers = {input = input, cached = cached, output = output, cost =", "numbers = {input = input, cached = "
         "cached, output = output, cost = 2 *", "its events have 0."),
        ("return (input - cached) * r.input_price +", "return", "their tokens cost 0."),
        ("limit_name ~= 'budget_warning' and", "string.sub(limit_name, 1, 6) ~= 'budget' and", "its budget is 0."),
    ],
)  # fmt: skip
def test_money_that_is_charged_wrongly_is_found(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str, found: str
) -> None:
    break_library(monkeypatch, old, new)
    assert any(found in line for line in run_with_a_budget().wrong)


def run_with_weights() -> Outcome:
    """Run 60 requests that come at once at one worker with two rows: a third each with two keys, and without one."""
    plans = tuple(
        replace(plan(number, 1.0 + number / 1_000, 8), router=0, key=("heavy", "light", "")[number % 3])
        for number in range(60)
    )
    cluster = {"workers": 1, "routers": 1, "rows": 2, "kv_blocks": 400, "backlog": False}
    quotas = "[keys.heavy]\nweight = 5\n[keys.light]\nweight = 0.5\nqueue_share = 0.001\n"
    return simulate_scenario(replace(draw(0), plans=plans, faults=(), quotas=quotas, **cluster))  # type: ignore[arg-type]


def test_keys_share_their_tenants_work_by_weight_within_their_share_of_the_queue() -> None:
    outcome = run_with_weights()
    assert not outcome.wrong, str(outcome)
    assert outcome.keys_compared > 100
    assert set(outcome.ends) == {End.COMPLETED, End.REFUSED}
    assert outcome.ends[End.REFUSED] <= 10, "10 calls of the light key may wait"


def test_keys_without_turns_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    break_library(monkeypatch, "return turn, {turn_field", "return 0, {turn_field")
    assert any("differs by" in line for line in run_with_weights().wrong)


def leavers(kill_s: float, *faults: Fault) -> Outcome:
    """Run requests at a router that is killed; their clients leave then, so that nobody resumes them."""
    plans = tuple(
        replace(one, deadline_s=kill_s + 0.05 - one.start_s) for one in (plan(n, 1.0 + n / 20, 200) for n in range(8))
    )
    cluster = {"workers": 2, "routers": 1, "rows": 8, "kv_blocks": 400, "backlog": False}
    faults = (*faults, Fault(Kind.ROUTER_KILL, kill_s, 0.5, 0, 0))
    quotas = "[tenants.one]\ntokens_per_day = 10000\n"
    return simulate_scenario(replace(draw(0), plans=plans, faults=faults, quotas=quotas, **cluster))  # type: ignore[arg-type]


@pytest.mark.parametrize("faults", [(), (Fault(Kind.REDIS_DOWN, 3.0, 3.0, 0, 0),)])
def test_tokens_of_a_dead_router_are_uncharged_for_its_last_second_and_an_outage(
    monkeypatch: pytest.MonkeyPatch, faults: tuple[Fault, ...]
) -> None:
    outcome = leavers(4.0, *faults)
    assert outcome.ends == {End.LATE: 8}
    assert not outcome.wrong, str(outcome)
    monkeypatch.setattr(
        "loraplex.router.quotas.quotas.RENEW_S", 5.0
    )  # the router tells the ledger less often than it must
    assert [line for line in leavers(4.0, *faults).wrong if "was charged" in line]
