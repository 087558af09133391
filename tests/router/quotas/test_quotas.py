"""A router's quotas on Redis: refusals, ends, resumption at another router, lost data and a Redis that is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from loraplex.admin.v1 import accounts_pb2
from loraplex.contracts.broker.functions import Library, shipped_functions
from loraplex.contracts.broker.keys import LEDGER
from loraplex.contracts.broker.ledger import Ledger
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.quotas.quotas import CallBudget, Facts, Quotas, rates_of
from loraplex.runtime.rpc.errors import Aborted, Exhausted, Unavailable
from tests.accounts import account_of
from tests.plans_file import plans_in
from tests.router.recording_link import RecordingLink, frame, job

# A ledger that has lost data is closed for a moment, not for seconds.
LIBRARY = Library(shipped_functions(RECOVERY_MS=20))
New = Callable[..., Quotas]
# Nano-units for a token of input, of cached input and of output.
PRICES = "[prices]\ntiny = [150, 75, 600]\n"
TINY = Facts(model="tiny")


class Store:
    """Keeps accounts; `error` is raised instead."""

    def __init__(self) -> None:
        self.kept: dict[str, accounts_pb2.Account] = {}
        self.error: Exception | None = None

    async def save_accounts(self, accounts: Sequence[accounts_pb2.Account]) -> None:
        """Keep accounts."""
        if self.error is not None:
            raise self.error
        self.kept |= {one.name: one for one in accounts}

    async def account_pages(self) -> AsyncIterator[list[accounts_pb2.Account]]:
        """Yield what was kept."""
        if self.error is not None:
            raise self.error
        yield list(self.kept.values())


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def new(redis: Redis, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> New:
    """Make the quotas of a router; the tenant acme has the limits given."""

    def make(table: str = "tenants.acme", prices: str = "", **limits: float) -> Quotas:
        path = tmp_path / "plans.toml"
        path.write_text(f"[{table}]\n" + "".join(f"{name} = {most}\n" for name, most in limits.items()) + prices)
        accounts: Any = store
        return Quotas(Ledger(redis, LIBRARY), plans_in(path), store=accounts)

    return make


async def reserved(quotas: Quotas, *amounts: int, resumed: tuple[str, int] | None = None) -> CallBudget:
    budget = await quotas.reserve("acme", *amounts, resumed=resumed)
    assert budget is not None
    return budget


async def day_tokens(redis: Redis, name: str = "acme") -> int:
    """Return what an account has of a day, held or charged."""
    account = await account_of(redis, name)
    return account["day_tokens"] + account["held_day_tokens"]


async def held_by(redis: Redis, quotas: Quotas) -> set[str]:
    """Return the ids of a router's open reservations."""
    found: Any = await redis.smembers(f"{LEDGER}held:{quotas.ledger.router}")
    return {one.decode() for one in found}


def begun(budget: CallBudget, delivered: int) -> None:
    """Let a worker begin the budget's job of two prompt tokens, and the client get tokens."""
    routed = RoutedJob(job())
    routed.bind(RecordingLink("w"), 1)
    routed.accept(frame(0, 7))
    budget.jobs.append(routed)
    budget.delivered = lambda: delivered


async def test_a_tenant_without_limits_costs_nothing(new: New, redis: Redis) -> None:
    assert await new().reserve("acme", 10, 10) is None
    assert await new(tokens_per_day=1).reserve("globex", 10, 10) is None
    assert await redis.keys() == []


async def test_a_refusal_says_whose_quota_it_is_and_when_to_come_again(new: New) -> None:
    quotas = new(tokens_per_day=100)
    await reserved(quotas, 40, 40)
    with pytest.raises(Exhausted) as refused:
        await quotas.reserve("acme", 40, 40)
    assert (refused.value.reason, refused.value.subject) == ("QUOTA_EXCEEDED", "tenants/acme/quotas/tokens_per_day")
    assert refused.value.retry_after_s is not None
    assert 0 < refused.value.retry_after_s <= 86_401
    most, left, ends_s = refused.value.rate_limits["tokens"]
    assert (most, left) == (100, 20)
    assert 0 <= refused.value.retry_after_s - ends_s <= 1.001
    with pytest.raises(Exhausted) as never:
        await quotas.reserve("acme", 40, 70)
    assert never.value.retry_after_s is None


async def test_a_budget_says_of_which_limits_least_is_left(new: New) -> None:
    quotas = new(tokens_per_day=1_000, output_tokens_per_minute=500, requests_per_minute=9, concurrent_streams=3)
    await reserved(quotas, 40, 60)
    rates = rates_of(await reserved(quotas, 40, 60))
    assert {kind: rate[:2] for kind, rate in rates.items()} == {"requests": (9, 7), "tokens": (500, 380)}
    assert all(0 < ends_s <= 60 for _, _, ends_s in rates.values())
    assert rates_of(await reserved(new(concurrent_streams=9), 1, 1)) == {}


async def test_what_a_request_used_stays_and_the_rest_comes_back(new: New, redis: Redis) -> None:
    quotas = new(tokens_per_day=1_000)
    whole, left, refused = [await reserved(quotas, 2, 100) for _ in range(3)]
    begun(whole, 60)
    begun(left, 5)
    whole.settle()
    whole.settle()
    left.leave()
    refused.settle()
    await quotas.drain(5.0)
    # The one that was left may be resumed: it is still reserved.
    assert await day_tokens(redis) == 62 + 102
    assert await held_by(redis, quotas) == {left.reservation.id}


async def test_a_request_that_nobody_resumes_ends_after_a_while(
    new: New, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.router.quotas.quotas.LINGER_S", 0.01)
    quotas = new(tokens_per_day=1_000)
    begun(left := await reserved(quotas, 2, 100), 5)
    await asyncio.wait_for(left.leave(), 60)
    assert await day_tokens(redis) == 7


async def test_a_resumed_request_is_charged_once_though_both_routers_settle(new: New, redis: Redis) -> None:
    first, second = new(tokens_per_day=1_000), new(tokens_per_day=1_000)
    budget = await reserved(first, 2, 100)
    begun(budget, 30)
    resumed = await reserved(second, 2, 100, resumed=(budget.reservation.id, 30))
    budget.leave()
    await first.drain(5.0)
    begun(resumed, 100)
    resumed.settle()
    await second.drain(5.0)
    assert await day_tokens(redis) == 102


async def test_a_router_learns_soon_that_a_request_which_was_left_to_it_is_resumed(
    new: New, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.router.quotas.quotas.LINGER_S", 3600.0)
    first, second = new(tokens_per_day=1_000), new(tokens_per_day=1_000)
    begun(left := await reserved(first, 2, 100), 30)
    left.leave()
    await first.renew()
    begun(resumed := await reserved(second, 2, 100, resumed=(left.reservation.id, 20)), 100)
    await first.renew()
    await asyncio.wait_for(left.leave(), 60)
    resumed.settle()
    await second.drain(5.0)
    await redis.flushdb()
    await first.drain(5.0)
    await second.drain(5.0)
    assert await day_tokens(redis) == 112


async def test_a_request_resumed_at_its_own_router_is_charged_once(new: New, redis: Redis) -> None:
    quotas = new(tokens_per_day=1_000)
    begun(budget := await reserved(quotas, 2, 100), 30)
    budget.leave()
    begun(resumed := await reserved(quotas, 2, 100, resumed=(budget.reservation.id, 30)), 100)
    quotas.end(budget)  # as the first call's end does after a while
    await quotas.drain(5.0)
    assert await held_by(redis, quotas) == {budget.reservation.id}
    resumed.settle()
    await quotas.drain(5.0)
    assert await day_tokens(redis) == 102


async def test_a_call_whose_request_another_router_has_ends(new: New, redis: Redis) -> None:
    first, second = new(tokens_per_day=1_000), new(tokens_per_day=1_000)
    begun(budget := await reserved(first, 2, 100), 30)
    elsewhere = await reserved(second, 2, 100, resumed=(budget.reservation.id, 30))
    await first.renew()
    (routed,) = budget.jobs
    with pytest.raises(Aborted):
        await routed.arrivals(routed.reader)
    back = await reserved(first, 2, 100, resumed=(budget.reservation.id, 30))
    begun(back, 30)
    await first.renew()
    assert back.jobs[0].reader.error is None
    for one in (budget, elsewhere, back):
        one.settle()
    await asyncio.gather(first.drain(5.0), second.drain(5.0))
    assert await day_tokens(redis) == 32


async def test_a_redis_that_lost_its_data_gets_the_accounts_and_reservations_back(new: New, redis: Redis) -> None:
    first, second = new(tokens_per_day=1_000), new(tokens_per_day=1_000)
    for quotas in (first, second):
        begun(done := await reserved(quotas, 2, 200), 200)
        await done.settle()
    begun(running := await reserved(first, 2, 300), 10)
    await redis.flushdb()
    await asyncio.gather(first.renew(), second.renew())
    with pytest.raises(Exhausted):
        await second.reserve("acme", 2, 300)
    running.settle()
    await first.drain(5.0)
    assert await day_tokens(redis) == 404 + 12


async def test_routers_that_restarted_fill_a_wiped_redis_from_the_store(new: New, redis: Redis, store: Store) -> None:
    first = new("default", tokens_per_day=1_000)
    begun(done := await reserved(first, 2, 900), 900)
    done.settle()
    await first.drain(5.0)  # it stops: what it knew is with the store alone
    await redis.flushdb()
    successor = new("default", tokens_per_day=1_000)
    store.error = Unavailable("the store does not answer")
    with pytest.raises(Unavailable):
        await successor.reserve("acme", 2, 900)
    store.error = None
    with pytest.raises(Exhausted):
        await successor.reserve("acme", 2, 900)
    assert await day_tokens(redis) == 902


@pytest.mark.parametrize("within", [False, True])
async def test_what_a_router_saves_while_a_wiped_redis_is_filled_is_not_lost(
    new: New, redis: Redis, store: Store, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    first, other = new(tokens_per_day=1_000), new(tokens_per_day=1_000)
    budget = await reserved(other, 2, 100)
    begun(budget, 60)
    await budget.settle()
    await first.renew()
    await redis.flushdb()
    await first.renew()  # fills it from the store, which has nothing yet
    read = store.account_pages

    async def read_then_save() -> AsyncIterator[list[accounts_pb2.Account]]:
        pages = [page async for page in read()]
        await other.save()
        for page in pages:
            yield page

    if within:
        monkeypatch.setattr(store, "account_pages", read_then_save)
    else:
        await other.save()
    await other.renew()
    assert not other.ledger.unsaved
    assert await day_tokens(redis) == 62


async def test_accounts_that_the_store_did_not_take_are_saved_later(new: New, store: Store) -> None:
    quotas = new(tokens_per_day=1_000)
    begun(done := await reserved(quotas, 2, 100), 60)
    await done.settle()
    store.error = Unavailable("the store does not answer")
    await quotas.save()
    assert not store.kept
    store.error = None
    await quotas.save()
    assert store.kept["acme"].day_tokens == 62
    assert not quotas.ledger.unsaved


async def test_a_router_that_stops_saves_accounts_once_a_store_that_restarts_is_back(
    new: New, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas = new(tokens_per_day=1_000)
    begun(done := await reserved(quotas, 2, 100), 60)
    await done.settle()
    store.error = Unavailable("the store does not answer")
    save = quotas.save

    async def save_and_restart() -> None:
        await save()
        store.error = None

    monkeypatch.setattr(quotas, "save", save_and_restart)
    await quotas.drain(5.0)
    assert store.kept["acme"].day_tokens == 62


async def test_an_end_is_settled_once_redis_is_back(new: New, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    quotas = new(tokens_per_day=1_000)
    begun(budget := await reserved(quotas, 2, 100), 60)
    ledger, away = quotas.ledger, asyncio.Event()

    async def refuse(*arguments: Any, **options: Any) -> None:
        away.set()
        raise RedisConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "tell", refuse)
        patch.setattr(ledger, "reserve", refuse)
        budget.settle()
        await away.wait()
        with pytest.raises(Unavailable) as unavailable:
            await quotas.reserve("acme", 2, 100)
    assert unavailable.value.reason == "LEDGER_DOWN"
    await quotas.drain(5.0)
    assert await day_tokens(redis) == 62


async def test_tokens_of_a_forgotten_request_are_input_that_is_charged_once_it_is_computed(
    new: New, redis: Redis
) -> None:
    quotas = new(tokens_per_day=5_000)
    idle = await reserved(quotas, 2, 3_000, resumed=("unknown", 2_990))
    await idle.settle()  # its job never ran
    assert await day_tokens(redis) == 0
    begun(resumed := await reserved(quotas, 2, 3_000, resumed=("forgotten", 2_990)), 3_000)
    await resumed.settle()
    assert await day_tokens(redis) == 2 + 2_990 + 10
    with pytest.raises(Exhausted):
        await quotas.reserve("acme", 2, 3_000, resumed=("another", 2_990))


async def test_a_plan_bounds_what_one_request_may_ask_for(new: New) -> None:
    quotas = new(context_tokens=50, answers_per_request=2, priority_ceiling=1)
    assert quotas.apply_plan(replace(job(max_tokens=40), priority=5)).priority == 1
    for large in (job(max_tokens=49), job(max_tokens=40, n=3)):
        with pytest.raises(Exhausted, match="the plan of acme has") as refused:
            quotas.apply_plan(large)
        assert refused.value.retry_after_s is None


@pytest.mark.parametrize(
    ("plan", "n", "most"),
    [
        ({}, 1, 30_000),
        ({"output_tokens_per_minute": 16_000, "tokens_per_day": 1_000_000}, 1, 1_000),
        ({"output_tokens_per_minute": 16_000}, 4, 250),
        ({"tokens_per_month": 500}, 1, 128),
        ({"context_tokens": 50}, 1, 48),
        # A small limit leaves room for one: its prompt has two tokens.
        ({"tokens_per_day": 100}, 1, 98),
        ({"tokens_per_month": 100, "output_tokens_per_minute": 90}, 1, 90),
        ({"budget_per_month": 0.0000405}, 1, 66),
        ({"budget_per_month": 0.24}, 1, 25_000),
        ({"tokens_per_day": 100}, 4, 24),
        ({"tokens_per_day": 2}, 1, 1),
    ],
)
async def test_an_answer_without_a_maximum_leaves_room_for_others(new: New, plan: Any, n: int, most: int) -> None:
    quotas = new(prices=PRICES, **plan)
    asked = job(max_tokens=30_000, n=n)
    bounded = quotas.apply_plan(asked, is_open_ended=True)
    assert bounded.stopping.max_tokens == most
    if plan.get("tokens_per_day") != 2:
        await quotas.reserve("acme", len(bounded.prompt_ids), n * most, facts=TINY)
    if "context_tokens" not in plan:
        assert quotas.apply_plan(asked) == asked


KEY_PLANS = "[tenants.acme]\ntokens_per_day = 300\n[keys.k1]\ntokens_per_day = 150\npriority_ceiling = 1\n"


@pytest.fixture
def with_key(redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quotas:
    """Make the quotas of a router whose calls come with key k1, which has a plan within that of acme."""
    path = tmp_path / "plans.toml"
    path.write_text(KEY_PLANS)
    monkeypatch.setattr("loraplex.router.quotas.quotas.calling_key", lambda: "k1")
    return Quotas(Ledger(redis, LIBRARY), plans_in(path))


async def test_a_call_is_reserved_and_settled_in_both_accounts(with_key: Quotas, redis: Redis) -> None:
    begun(budget := await reserved(with_key, 2, 100), 60)
    assert [await day_tokens(redis, name) for name in ("acme", "keys/k1")] == [102, 102]
    with pytest.raises(Exhausted) as refused:
        await with_key.reserve("acme", 2, 100)
    assert refused.value.subject == "keys/k1/quotas/tokens_per_day"
    await asyncio.wait_for(budget.settle(), 60)
    assert [await day_tokens(redis, name) for name in ("acme", "keys/k1")] == [62, 62]
    assert with_key.apply_plan(replace(job(), priority=5)).priority == 1


async def test_what_the_tenant_has_no_room_for_leaves_the_keys_account_alone(with_key: Quotas, redis: Redis) -> None:
    other = Quotas(Ledger(redis, LIBRARY), with_key._plans)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loraplex.router.quotas.quotas.calling_key", lambda: "k2")
        await reserved(other, 100, 100)
    with pytest.raises(Exhausted) as refused:
        await with_key.reserve("acme", 50, 60)
    assert refused.value.subject == "tenants/acme/quotas/tokens_per_day"
    assert await day_tokens(redis, "keys/k1") == 0


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("error", [RedisConnectionError("away"), asyncio.CancelledError(), ValueError("odd")])
async def test_a_failed_reservation_leaves_nothing_in_either_account(
    with_key: Quotas, redis: Redis, monkeypatch: pytest.MonkeyPatch, error: BaseException, *, carried_out: bool
) -> None:
    ledger = with_key.ledger
    reserve = ledger.reserve
    await ledger.fill([], closes=False)

    async def fail(*arguments: Any) -> None:
        if carried_out:
            await reserve(*arguments)
        raise error

    monkeypatch.setattr(ledger, "reserve", fail)
    with pytest.raises(Unavailable if isinstance(error, RedisConnectionError) else type(error)):
        await with_key.reserve("acme", 2, 100)
    await with_key.drain(5.0)
    assert [await day_tokens(redis, name) for name in ("acme", "keys/k1")] == [0, 0]
    assert not await held_by(redis, with_key)
    assert not with_key._budgets


async def test_a_request_resumed_with_another_key_is_charged_once_to_each(
    with_key: Quotas, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(budget := await reserved(with_key, 2, 100), 30)
    budget.leave()
    await with_key.renew()
    monkeypatch.setattr("loraplex.router.quotas.quotas.calling_key", lambda: "")
    begun(resumed := await reserved(with_key, 2, 100, resumed=(budget.reservation.id, 30)), 100)
    resumed.settle()
    await with_key.drain(5.0)
    assert [await day_tokens(redis, name) for name in ("acme", "keys/k1")] == [102, 32]


async def test_a_budget_holds_and_is_charged_the_cost_of_tokens(new: New, redis: Redis) -> None:
    quotas = new(prices=PRICES, budget_per_month=0.00003)  # 30,000 nano-units
    budget = await quotas.reserve("acme", 2, 40, facts=TINY)
    assert budget is not None
    assert (await account_of(redis, "acme"))["held_month_cost"] == 2 * 150 + 40 * 600
    with pytest.raises(Exhausted) as refused:
        await quotas.reserve("acme", 2, 10, facts=TINY)
    assert refused.value.subject == "tenants/acme/quotas/budget_per_month"
    assert "budget_per_month is 3e-05" in refused.value.message
    begun(budget, 3)
    budget.jobs[0].cached_tokens = 1
    await budget.settle()
    account = await account_of(redis, "acme")
    assert (account["month_cost"], account["held_month_cost"]) == (150 + 75 + 3 * 600, 0)
    assert await quotas.reserve("acme", 2, 10, facts=TINY)


async def test_the_store_learns_once_that_a_budget_has_refused_a_call(new: New, store: Store) -> None:
    quotas = new(prices=PRICES, budget_per_month=0.00003)
    for tokens in (40, 100):  # the second request alone is more than the budget
        with suppress(Exhausted):
            await quotas.reserve("acme", 2, tokens, facts=TINY)
    await quotas.save()
    assert not any(one.budget_spent for one in store.kept.values())
    with pytest.raises(Exhausted):
        await quotas.reserve("acme", 2, 40, facts=TINY)
    store.error = Unavailable("away", reason="STORE_DOWN")
    await quotas.save()
    store.error = None
    await quotas.save()
    assert store.kept.pop("acme").budget_spent
    await quotas.save()
    assert store.kept == {}


async def test_fifty_calls_at_once_at_two_routers_within_a_budget_of_one_more(new: New, redis: Redis) -> None:
    limits = {"budget_per_month": 2 * 24_300 / 1e9}
    first, second = new(prices=PRICES, **limits), new(prices=PRICES, **limits)
    spent = await first.reserve("acme", 2, 40, facts=TINY)
    assert spent is not None
    begun(spent, 40)
    await spent.settle()
    calls = [quotas.reserve("acme", 2, 40, facts=TINY) for quotas in (first, second) for _ in range(25)]
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(one, CallBudget) for one in ends) == 1
    assert {one.subject for one in ends if isinstance(one, Exhausted)} == {"tenants/acme/quotas/budget_per_month"}
    account = await account_of(redis, "acme")
    assert account["month_cost"] + account["held_month_cost"] == 2 * 24_300


async def test_a_warning_alone_keeps_the_account_and_refuses_nothing(new: New, redis: Redis) -> None:
    quotas = new(prices=PRICES, budget_warning=0.00001)
    for _ in range(3):
        budget = await quotas.reserve("acme", 2, 40, facts=TINY)
        assert budget is not None
        begun(budget, 40)
        await budget.settle()
    assert (await account_of(redis, "acme"))["month_cost"] == 3 * (2 * 150 + 40 * 600)
