"""A router's quotas on Redis: refusals, ends, resumption at another router, lost data and a Redis that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from broker.keys import ledger_prefix
from broker.ledger import Ledger
from broker.ledger_records import AccountCopy
from broker.scripts import Scripts
from router.dispatch.routed_job import RoutedJob
from router.quotas.grant import End, Grant
from router.quotas.plans import Plans
from router.quotas.quotas import Quotas
from rpc.errors import Aborted, Exhausted, Unavailable
from tests.router.recording_link import RecordingLink, frame, job

NO_RECOVERY = Scripts(constants={"RECOVERY_MS": 0})
New = Callable[..., Quotas]


@pytest.fixture
def new(redis: Redis, tmp_path: Path) -> New:
    """Make the quotas of a router; the tenant acme has the limits given."""

    def make(**limits: int) -> Quotas:
        path = tmp_path / "plans.toml"
        path.write_text("[tenants.acme]\n" + "".join(f"{name} = {most}\n" for name, most in limits.items()))
        return Quotas(Ledger(redis, NO_RECOVERY), Plans(path), retry_s=0.01)

    return make


async def granted(quotas: Quotas, *amounts: int, resumed: tuple[str, int] | None = None) -> Grant:
    grant = await quotas.reserve("acme", *amounts, resumed=resumed)
    assert grant is not None
    return grant


async def account(redis: Redis, name: str = "acme") -> AccountCopy:
    return (await Ledger(redis).look(name, AccountCopy())).account


def begun(grant: Grant, delivered: int) -> None:
    """Let a worker begin the grant's job of two prompt tokens, and the client get tokens."""
    routed = RoutedJob(job())
    routed.bind(RecordingLink("w"), 1)
    routed.accept(frame(0, 7))
    grant.jobs.append(routed)
    grant.delivered = lambda: delivered


async def test_a_tenant_without_limits_costs_nothing(new: New, redis: Redis) -> None:
    assert await new().reserve("acme", 10, 10) is None
    assert await new(tokens_per_day=1).reserve("globex", 10, 10) is None
    assert await redis.keys() == []


async def test_a_refusal_says_whose_quota_it_is_and_when_to_come_again(new: New) -> None:
    quotas = new(tokens_per_day=100)
    await granted(quotas, 40, 40)
    with pytest.raises(Exhausted) as refused:
        await quotas.reserve("acme", 40, 40)
    assert (refused.value.reason, refused.value.subject) == ("QUOTA_EXCEEDED", "tenants/acme/quotas/tokens_per_day")
    assert refused.value.retry_after_s is not None
    assert 0 < refused.value.retry_after_s <= 86_401
    with pytest.raises(Exhausted) as never:
        await quotas.reserve("acme", 40, 70)
    assert never.value.retry_after_s is None


async def test_what_a_request_used_stays_and_the_rest_comes_back(new: New, redis: Redis) -> None:
    quotas = new(tokens_per_day=1_000)
    whole, left, refused = [await granted(quotas, 2, 100) for _ in range(3)]
    begun(whole, 60)
    begun(left, 5)
    whole.settle(End.FINISHED)
    whole.settle(End.ENDED)
    left.settle(End.LEFT)
    refused.settle(End.ENDED)
    await quotas.drain(5.0)
    # The one that was left may be resumed: it is still reserved.
    assert (await account(redis)).day_tokens == 62 + 102
    assert (await account(redis)).requests in {2, 0}  # the minute may have passed


async def test_a_resumed_request_is_charged_once_though_both_routers_settle(new: New, redis: Redis) -> None:
    first, second = new(tokens_per_day=1_000), new(tokens_per_day=1_000)
    grant = await granted(first, 2, 100)
    begun(grant, 30)
    resumed = await granted(second, 2, 100, resumed=(grant.id, 20))
    grant.settle(End.LEFT)
    await first.drain(5.0)
    begun(resumed, 100)
    resumed.settle(End.FINISHED)
    await second.drain(5.0)
    assert (await account(redis)).day_tokens == 102


async def test_a_call_whose_request_another_router_has_ends(new: New, redis: Redis) -> None:
    first, second = new(tokens_per_day=1_000), new(tokens_per_day=1_000)
    begun(grant := await granted(first, 2, 100), 30)
    elsewhere = await granted(second, 2, 100, resumed=(grant.id, 0))
    await first._accounts.look_at_used([])
    (routed,) = grant.jobs
    with pytest.raises(Aborted):
        await routed.arrivals(routed.reader)
    back = await granted(first, 2, 100, resumed=(grant.id, 0))
    begun(back, 30)
    await first._accounts.look_at_used([])
    assert back.jobs[0].reader.error is None
    for one in (grant, elsewhere, back):
        one.settle(End.FINISHED)
    await asyncio.gather(first.drain(5.0), second.drain(5.0))
    assert (await account(redis)).day_tokens == 32


async def test_a_redis_that_lost_its_data_gets_the_account_back(new: New, redis: Redis) -> None:
    quotas = new(tokens_per_day=1_000)
    begun(done := await granted(quotas, 2, 400), 400)
    done.settle(End.FINISHED)
    begun(running := await granted(quotas, 2, 300), 10)
    await quotas.drain(5.0)
    await redis.flushdb()
    with pytest.raises(Exhausted):
        await quotas.reserve("acme", 2, 300)
    running.settle(End.FINISHED)
    await quotas.drain(5.0)
    assert (await account(redis)).day_tokens == 402 + 12


async def test_looks_renew_what_runs_and_find_lost_data_of_idle_tenants(new: New, redis: Redis) -> None:
    quotas = new(tokens_per_day=1_000)
    begun(done := await granted(quotas, 2, 400), 400)
    done.settle(End.FINISHED)
    await quotas.drain(5.0)
    quotas._accounts.find("acme").used_at = float("-inf")
    await quotas._accounts.look_at_used([])
    await redis.flushdb()
    await quotas._accounts.look_at_used([])
    assert (await account(redis)).day_tokens == 402
    begun(running := await granted(quotas, 2, 100), 50)
    await quotas._accounts.look_at_used([])
    held = await redis.zrange(ledger_prefix("acme") + "held", 0, -1)
    assert held == [running.id.encode()]


async def test_an_end_is_settled_once_redis_is_back(new: New, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    quotas = new(tokens_per_day=1_000)
    begun(grant := await granted(quotas, 2, 100), 60)
    ledger, away = quotas._ledger, asyncio.Event()
    settle = ledger.settle

    async def refuse(*arguments: Any) -> AccountCopy:
        away.set()
        raise RedisConnectionError("away")

    monkeypatch.setattr(ledger, "settle", refuse)
    monkeypatch.setattr(ledger, "reserve", refuse)
    grant.settle(End.FINISHED)
    await away.wait()
    with pytest.raises(Unavailable) as unavailable:
        await quotas.reserve("acme", 2, 100)
    assert unavailable.value.reason == "LEDGER_DOWN"
    monkeypatch.setattr(ledger, "settle", settle)
    await quotas.drain(5.0)
    assert (await account(redis)).day_tokens == 62


async def test_a_plan_bounds_what_one_request_may_ask_for(new: New) -> None:
    quotas = new(context_tokens=50, answers_per_request=2, priority_ceiling=1)
    assert quotas.apply_plan(replace(job(max_tokens=40), priority=5)).priority == 1
    for large in (job(max_tokens=49), job(max_tokens=40, n=3)):
        with pytest.raises(Exhausted, match="the plan of acme has") as refused:
            quotas.apply_plan(large)
        assert refused.value.retry_after_s is None


KEY_PLANS = "[tenants.acme]\ntokens_per_day = 300\n[keys.k1]\ntokens_per_day = 150\npriority_ceiling = 1\n"


@pytest.fixture
def with_key(redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quotas:
    """Make the quotas of a router whose calls come with key k1, which has a plan within that of acme."""
    path = tmp_path / "plans.toml"
    path.write_text(KEY_PLANS)
    monkeypatch.setattr("router.quotas.quotas.calling_key", lambda: "k1")
    return Quotas(Ledger(redis, NO_RECOVERY), Plans(path), retry_s=0.01)


async def test_a_call_is_reserved_and_settled_in_both_accounts(with_key: Quotas, redis: Redis) -> None:
    begun(grant := await granted(with_key, 2, 100), 60)
    assert set(grant.reservations) == {"acme", "keys/k1"}
    await with_key._accounts.look_at_used([])
    for name in grant.reservations:
        assert await redis.zrange(ledger_prefix(name) + "held", 0, -1) == [grant.id.encode()]
    with pytest.raises(Exhausted) as refused:
        await with_key.reserve("acme", 2, 100)
    assert refused.value.subject == "keys/k1/quotas/tokens_per_day"
    await asyncio.wait_for(grant.settle(End.FINISHED), 5.0)
    assert [(await account(redis, name)).day_tokens for name in ("acme", "keys/k1")] == [62, 62]
    assert with_key.apply_plan(replace(job(), priority=5)).priority == 1


async def test_what_the_tenant_has_no_room_for_leaves_the_keys_account_alone(with_key: Quotas, redis: Redis) -> None:
    other = Quotas(Ledger(redis, NO_RECOVERY), with_key._plans)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.quotas.quotas.calling_key", lambda: "k2")
        await granted(other, 100, 100)
    with pytest.raises(Exhausted) as refused:
        await with_key.reserve("acme", 50, 60)
    assert refused.value.subject == "tenants/acme/quotas/tokens_per_day"
    await with_key.drain(5.0)
    assert (await account(redis, "keys/k1")).day_tokens == 0


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("error", [RedisConnectionError("away"), asyncio.CancelledError(), ValueError("odd")])
async def test_a_failed_reservation_of_the_tenant_leaves_nothing_in_either_account(
    with_key: Quotas, redis: Redis, monkeypatch: pytest.MonkeyPatch, error: BaseException, *, carried_out: bool
) -> None:
    reserve = with_key._ledger.reserve

    async def fail(account: str, *rest: Any) -> object:
        if account == "acme" and not carried_out:
            raise error
        answer = await reserve(account, *rest)
        if account == "acme":
            raise error
        return answer

    monkeypatch.setattr(with_key._ledger, "reserve", fail)
    with pytest.raises(Unavailable if isinstance(error, RedisConnectionError) else type(error)):
        await with_key.reserve("acme", 2, 100)
    await with_key.drain(5.0)
    for name in ("acme", "keys/k1"):
        assert (await account(redis, name)).day_tokens == 0
        assert not await redis.exists(ledger_prefix(name) + "held")
        assert not with_key._accounts.find(name).grants


async def test_a_request_resumed_with_another_key_is_charged_once_to_each(
    with_key: Quotas, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(grant := await granted(with_key, 2, 100), 30)
    grant.settle(End.LEFT)
    await with_key.drain(5.0)
    monkeypatch.setattr("router.quotas.quotas.calling_key", lambda: "")
    begun(resumed := await granted(with_key, 2, 100, resumed=(grant.id, 30)), 100)
    resumed.settle(End.FINISHED)
    await with_key.drain(5.0)
    assert (await account(redis)).day_tokens == 102
