"""Test the ledger's functions on Redis: quotas, charges, ends of dead routers, resumption, lost data and clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from loraplex.contracts.broker import terms
from loraplex.contracts.broker.keys import LEDGER
from loraplex.contracts.broker.ledger import (
    Counts,
    Ledger,
    LedgerUnreadyError,
    QuotaReachedError,
    Reservation,
)
from tests.accounts import account_of
from tests.broker.clocked_queue import LIBRARY_ON_TEST_CLOCK, Clock

LIMITS = {"output_tokens_per_minute": 1000}
# Prices of a token of input, of cached input and of output.
PRICES = (150, 75, 600)


@dataclass
class Cluster:
    """Routers by name, on one Redis and the tests' clock."""

    redis: Redis
    clock: Clock
    routers: dict[str, Ledger] = field(default_factory=dict)

    async def router(self, name: str) -> Ledger:
        """Return a router that has joined the ledger."""
        if name not in self.routers:
            self.routers[name] = Ledger(self.redis, LIBRARY_ON_TEST_CLOCK, name)
            await self.routers[name].fill([], closes=False)
        return self.routers[name]

    async def reserve(
        self,
        number: int = 1,
        output: int = 100,
        received: int | None = None,
        *,
        router: str = "a",
        limits: Mapping[str, int] = LIMITS,
        prompt: int = 10,
        accounts: tuple[str, ...] = ("acme",),
        facts: str = "{}",
        prices: tuple[int, int, int] = (0, 0, 0),
        once: int = 0,
    ) -> Reservation:
        """Reserve tokens of a request; `prices` are of input, cached input and output."""
        reservation = Reservation(f"r{number}", " ".join(accounts), prompt, output, facts, once=once)
        reservation.input_price, reservation.cached_price, reservation.output_price = prices
        return await (await self.router(router)).reserve(reservation, received, dict.fromkeys(accounts, limits))

    async def refused(self, *arguments: Any, **options: Any) -> str:
        """Return which limit refuses a request, and for how long."""
        with pytest.raises(QuotaReachedError) as error:
            await self.reserve(*arguments, **options)
        return f"{error.value.limit} {error.value.wait_ms}"

    async def settle(
        self, one: Reservation, used_input: int, used_output: int, router: str = "a", cached: int = 0
    ) -> None:
        """End a reservation."""
        one.use(used_input, used_output, cached)
        one.open = False
        await (await self.router(router)).tell([one])

    async def leave(self, one: Reservation, used_input: int, used_output: int, router: str = "a") -> None:
        """End the call of a reservation, which may be resumed."""
        one.use(used_input, used_output)
        one.streams = 0
        await (await self.router(router)).tell([one])

    async def closed_s(self, ledger: Ledger) -> float:
        """Return for how long the ledger is closed for a router; 0: the router is to fill it."""
        with pytest.raises(LedgerUnreadyError) as error:
            await ledger.tell([])
        return error.value.closed_s

    async def renew_for(self, ms: int, router: str = "b") -> int:
        """Let time pass in which one router renews; return how many reservations it has ended."""
        ended = 0
        for _ in range(4):
            await self.clock.advance(ms // 4)
            ended += (await (await self.router(router)).tell([], renews=True))[0]
        return ended

    async def account(self, name: str = "acme") -> dict[str, int]:
        """Return an account as Redis has it."""
        return await account_of(self.redis, name)

    async def events(self) -> list[tuple[str, int, int]]:
        """Return the ids and counts of all events."""
        entries: Any = await self.redis.xrange(f"{LEDGER}usage")
        return [(one[b"id"].decode(), int(one[b"input"]), int(one[b"output"])) for _, one in entries]

    async def cost(self) -> tuple[int, int]:
        """Return what the events cost: by their own word, and by their tokens at PRICES."""
        entries: Any = await self.redis.xrange(f"{LEDGER}usage")
        computed, cached, made = PRICES
        by_word = by_tokens = 0
        for _, one in entries:
            of_input, of_cached, of_output, cost = (
                int(one[name]) for name in (b"input", b"cached", b"output", b"cost")
            )
            by_word += cost
            by_tokens += (of_input - of_cached) * computed + of_cached * cached + of_output * made
        return by_word, by_tokens


@pytest.fixture
async def cluster(redis: Redis, clock: Clock) -> Cluster:
    cluster = Cluster(redis, clock)
    await cluster.router("a")
    await clock.advance(terms.RECOVERY_MS)
    return cluster


async def test_a_limit_is_not_passed_and_has_room_in_the_next_minute(cluster: Cluster) -> None:
    for number in range(10):
        await cluster.reserve(number)
    left_ms = 60_000 - cluster.clock.now_ms % 60_000
    assert await cluster.refused(10) == f"output_tokens_per_minute {left_ms}"
    assert await cluster.refused(10, 1001) == "output_tokens_per_minute None"
    await cluster.clock.advance(left_ms)
    await cluster.reserve(10)


async def test_a_new_tenants_first_burst_is_within_its_quota(cluster: Cluster) -> None:
    await cluster.redis.flushdb()
    await cluster.clock.advance(0)
    await (await cluster.router("new")).fill([], closes=False)
    for number in range(10):
        await cluster.reserve(number, router="new")


async def test_what_was_not_used_comes_back_once(cluster: Cluster) -> None:
    reservation = await cluster.reserve(output=900)
    for _ in range(3):
        await cluster.settle(reservation, 10, 40)
    account = await cluster.account()
    assert (account["output_tokens"], account["input_tokens"], account["requests"], account["day_tokens"]) == (
        40,
        10,
        1,
        50,
    )
    await cluster.settle(await cluster.reserve(2), 0, 0)
    account = await cluster.account()
    assert (account["output_tokens"], account["requests"], account["month_tokens"], account["held_output_tokens"]) == (
        40,
        1,
        50,
        0,
    )
    assert await cluster.events() == [("r1:0", 10, 40)]


@pytest.mark.parametrize(
    ("limit", "most"),
    [("concurrent_streams", 2), ("requests_per_minute", 2), ("input_tokens_per_minute", 20), ("tokens_per_day", 220)],
)
async def test_each_limit_refuses(cluster: Cluster, limit: str, most: int) -> None:
    limits = {limit: most}
    first = await cluster.reserve(1, limits=limits)
    await cluster.reserve(2, limits=limits)
    assert (await cluster.refused(3, limits=limits)).startswith(limit)
    if limit == "concurrent_streams":
        await cluster.settle(first, 0, 0)
        await cluster.reserve(3, limits=limits)


@pytest.mark.parametrize("day", ["2026-01-31", "2026-02-28", "2028-02-29", "2026-12-31", "2100-02-28", "2027-06-15"])
async def test_months_and_days_end_by_utc(cluster: Cluster, day: str) -> None:
    begin_ms = round(datetime.fromisoformat(f"{day}T23:59:50").replace(tzinfo=UTC).timestamp() * 1e3)
    await cluster.clock.advance(begin_ms - cluster.clock.now_ms)
    limits = {"tokens_per_month": 150}
    await cluster.settle(await cluster.reserve(1, limits=limits), 10, 100)
    refusal = await cluster.refused(2, limits=limits)
    ends = day[-2:] in {"31", "28", "29"}
    assert refusal == "tokens_per_month 10000" if ends else int(refusal.split()[1]) > 86_400_000
    counts = (await cluster.router("a")).unsaved["acme"]
    assert counts.month == int(day[:4]) * 12 + int(day[5:7]) - 1
    await cluster.clock.advance(10_000)
    if ends:
        await cluster.reserve(2, limits=limits)


async def test_a_dead_routers_reservations_end_with_its_last_count(cluster: Cluster) -> None:
    running = [await cluster.reserve(number, accounts=(f"t{number}",)) for number in range(300)]
    for one in running:
        one.use(10, 30)
    router = await cluster.router("a")
    await router.tell(running, renews=True)
    assert not await cluster.renew_for(terms.HELD_MS - 4)
    await cluster.clock.advance(4)
    ended = [(await (await cluster.router("b")).tell([], renews=True))[0] for _ in range(2)]
    assert ended == [terms.EXPIRED_AT_ONCE, 300 - terms.EXPIRED_AT_ONCE]
    assert not await cluster.redis.exists(f"{LEDGER}held:a")
    accounts = [await cluster.account(f"t{number}") for number in range(300)]
    assert {(one["day_tokens"], one["held_day_tokens"]) for one in accounts} == {(40, 0)}
    assert len(await cluster.events()) == 300


async def test_a_router_that_comes_long_after_all_others_died_ends_their_reservations(cluster: Cluster) -> None:
    reservation = await cluster.reserve()
    reservation.use(10, 30)
    await (await cluster.router("a")).tell([reservation], renews=True)
    await cluster.clock.advance(3 * terms.HELD_MS)
    assert await (await cluster.router("b")).tell([], renews=True) == (1, set())
    account = await cluster.account()
    assert (account["day_tokens"], account["held_streams"]) == (40, 0)


async def test_renewals_read_no_routers_that_have_ended_and_know_one_that_comes_back(cluster: Cluster) -> None:
    for number in range(20):
        await cluster.router(f"ended{number}")
    paused = await cluster.router("a")
    await paused.tell([])
    await cluster.renew_for(2 * terms.HELD_MS)
    assert await cluster.redis.hkeys(f"{LEDGER}routers") == [b"b"]
    one = await cluster.reserve(1)  # not told to fill a ledger that has lost nothing
    one.use(10, 30)
    await paused.tell([one])
    await cluster.renew_for(2 * terms.HELD_MS)
    assert (await cluster.account())["held_day_tokens"] == 0, "one that comes back and dies ends as others do"


async def test_a_request_whose_first_router_tells_of_tokens_late_counts_once(cluster: Cluster) -> None:
    first = await cluster.reserve()
    second = await cluster.reserve(router="b", received=0)
    await cluster.settle(first, 10, 5)
    await cluster.settle(second, 10, 20, "b")
    assert (await cluster.account())["requests"] == 1


async def test_what_a_router_that_stood_still_settles_later_is_charged_too(cluster: Cluster) -> None:
    reservation = await cluster.reserve(output=900)
    reservation.use(10, 45)
    await (await cluster.router("a")).tell([reservation], renews=True)
    assert await cluster.renew_for(terms.HELD_MS + 4) == 1
    await cluster.settle(reservation, 10, 590)
    assert (await cluster.account())["day_tokens"] == 600
    assert await cluster.events() == [("r1:0", 10, 45), ("r1:1", 0, 545)]


async def test_an_end_whose_record_is_forgotten_is_charged_beyond_what_was_renewed(cluster: Cluster) -> None:
    reservation = await cluster.reserve(output=900)
    reservation.use(10, 45)
    await (await cluster.router("a")).tell([reservation], renews=True)
    await cluster.renew_for(terms.HELD_MS + 4)
    await cluster.redis.delete(f"{LEDGER}of:r1")
    await cluster.settle(reservation, 10, 590)
    assert (await cluster.account())["day_tokens"] == 600


async def test_after_an_outage_routers_have_the_time_to_renew(cluster: Cluster) -> None:
    running, gone = await cluster.reserve(), await cluster.reserve(2, router="b")
    await (await cluster.router("a")).tell([], renews=True)
    await (await cluster.router("b")).tell([], renews=True)
    await cluster.clock.advance(3 * terms.HELD_MS)
    assert await (await cluster.router("a")).tell([running], renews=True) == (0, set())
    assert await cluster.renew_for(terms.HELD_MS, "a") == 1
    await cluster.settle(gone, 10, 5, "b")
    await cluster.settle(running, 10, 20)
    assert (await cluster.account())["day_tokens"] == 45


async def test_a_clock_that_was_ahead_leaves_no_dead_router_alive_and_no_window_open(cluster: Cluster) -> None:
    await cluster.reserve()
    ahead = 600_000
    await cluster.clock.advance(ahead)
    late = await cluster.reserve(2)
    await (await cluster.router("a")).tell([], renews=True)
    await cluster.clock.advance(-ahead)
    assert await cluster.renew_for(2 * terms.HELD_MS) == 2
    account = await cluster.account()
    assert [account[name] for name in account if name.startswith("held_")] == [0] * 9
    await cluster.settle(late, 10, 20)
    assert (await cluster.account())["day_tokens"] == 30


async def test_a_resumed_request_keeps_its_reservation_and_is_charged_once(cluster: Cluster) -> None:
    first = await cluster.reserve(output=900)
    await cluster.leave(first, 10, 17)
    assert await cluster.refused(2, 200)
    resumed = await cluster.reserve(1, 900, 17, router="b")
    first.use(10, 18)
    assert await (await cluster.router("a")).tell([first], renews=True) == (0, {first.holder})
    await cluster.settle(resumed, 0, 60, "b")
    account = await cluster.account()
    assert (account["input_tokens"], account["output_tokens"], account["requests"], account["held_output_tokens"]) == (
        10,
        60,
        1,
        0,
    )
    assert await cluster.events() == [("r1:0", 10, 17), ("r1:1", 0, 43)]


async def test_a_request_that_was_handed_over_before_it_ran_is_charged_for_nothing(cluster: Cluster) -> None:
    first = await cluster.reserve(output=900)
    await cluster.leave(first, 0, 0)
    resumed = await cluster.reserve(1, 900, 0, router="b")
    assert (resumed.used_input, resumed.input) == (0, 10)
    await cluster.settle(resumed, 0, 0, "b")
    assert (await cluster.account())["day_tokens"] == 0
    assert await cluster.events() == []


async def test_a_place_among_the_streams_is_free_at_once_for_others(cluster: Cluster) -> None:
    one = {"concurrent_streams": 1}
    first = await cluster.reserve(limits=one)
    assert await cluster.refused(2, limits=one) == f"concurrent_streams {terms.STREAM_RETRY_MS}"
    await cluster.leave(first, 10, 5)
    other = await cluster.reserve(2, limits=one)
    resumed = await cluster.reserve(1, 100, 5, limits=one)  # resumed requests have as many places again
    assert await cluster.refused(3, limits=one)
    await cluster.settle(other, 10, 5)
    await cluster.settle(resumed, 10, 5)
    assert (await cluster.account())["streams"] == 0


async def test_a_request_whose_second_router_dies_too_is_charged_for_what_its_client_had(cluster: Cluster) -> None:
    first = await cluster.reserve()
    await cluster.leave(first, 10, 17)
    await cluster.reserve(1, 100, 30, router="c")
    assert await cluster.renew_for(terms.HELD_MS + 4) == 1
    assert (await cluster.account())["day_tokens"] == 40


async def test_calls_that_are_charged_once_make_one_event_whoever_ends_them(cluster: Cluster) -> None:
    one = await cluster.reserve(once=1)
    await cluster.settle(one, 0, 0)  # its caller died, and got nothing
    first = await cluster.reserve(once=1)
    second = await cluster.reserve(once=1, router="b")  # while the first one still runs
    assert (await cluster.account())["held_output_tokens"] == 100
    await cluster.settle(first, 10, 60)
    await cluster.settle(second, 10, 60, "b")
    again = await cluster.reserve(once=1, router="c", limits={"output_tokens_per_minute": 1})  # refuses no other
    assert not again.open
    assert await cluster.events() == [("r1:0", 10, 60)]
    assert (await cluster.account())["day_tokens"] == 70
    assert (await cluster.account())["held_output_tokens"] == 0


async def test_a_reservation_that_comes_after_its_end_holds_nothing(cluster: Cluster) -> None:
    await cluster.settle(Reservation("r1", "acme", 10, 900), 0, 0)  # cancelled before Redis got to it
    await cluster.reserve(output=900)
    assert (await cluster.account())["held_output_tokens"] == 0
    await cluster.reserve(2, 900)


async def test_the_prompt_of_a_whole_answer_without_tokens_is_charged_though_its_router_died_before_it_told(
    cluster: Cluster,
) -> None:
    await cluster.reserve(output=0)
    resumed = await cluster.reserve(1, 0, 0, prompt=0, router="b")
    await cluster.settle(resumed, 0, 0, "b")
    assert (await cluster.account())["input_tokens"] == 10
    assert await cluster.events() == [("r1:0", 10, 0)]


async def test_a_request_resumed_late_needs_room_and_is_charged_for_its_rest_alone(cluster: Cluster) -> None:
    first = await cluster.reserve(output=600)
    await cluster.settle(first, 10, 100)
    other = await cluster.reserve(2, 600)
    assert await cluster.refused(1, 600, 90, router="b")
    await cluster.settle(other, 10, 300)
    resumed = await cluster.reserve(1, 600, 90, router="b")
    await cluster.settle(resumed, 0, 600, "b")
    account = await cluster.account()
    assert (account["input_tokens"], account["output_tokens"], account["requests"]) == (20, 300 + 100 + 510, 2)


async def test_a_request_resumed_with_another_key_is_charged_to_each_for_its_part(cluster: Cluster) -> None:
    first = await cluster.reserve(accounts=("acme", "keys/one"))
    await cluster.leave(first, 10, 30)
    resumed = await cluster.reserve(1, 100, 30, accounts=("acme", "keys/two"))
    await cluster.settle(resumed, 0, 100)
    charged = [(await cluster.account(name))["day_tokens"] for name in ("acme", "keys/one", "keys/two")]
    assert charged == [110, 40, 70]
    assert [counts[1:] for counts in await cluster.events()] == [(10, 30), (0, 70)]


async def test_an_answer_that_is_made_again_and_again_is_charged_again(cluster: Cluster) -> None:
    """A client that says it has nothing of what it got has other tokens made each time, if it alters what it has."""
    await cluster.settle(await cluster.reserve(output=300), 10, 300)
    for received in (0, 100):
        await cluster.settle(await cluster.reserve(1, 300, received), 0, 300)
    assert (await cluster.account())["output_tokens"] == 300 + 300 + 200
    assert await cluster.refused(1, 300, 0) != ""


async def test_what_a_former_router_sent_beyond_what_the_client_told_is_counted_once(cluster: Cluster) -> None:
    first = await cluster.reserve(output=900)
    await cluster.leave(first, 10, 300)
    resumed = await cluster.reserve(1, 900, 300, router="b")
    for _ in range(2):
        await cluster.settle(first, 10, 600)  # 300 more, which the second router makes again
    await cluster.settle(resumed, 0, 900, "b")
    assert (await cluster.account())["output_tokens"] == 900 + 300


async def test_invented_tokens_that_the_ledger_does_not_know_are_input_and_charged(cluster: Cluster) -> None:
    limits = {"tokens_per_day": 5_000}
    charged = 0
    for number in range(4):
        try:  # the ledger has forgotten the request that the client has a token of
            resumed = await cluster.reserve(number, 3_000, 2_990, prompt=11, limits=limits)
        except QuotaReachedError:
            break
        await cluster.settle(resumed, resumed.input, 3_000)
        charged += 1
    assert charged == 1
    assert (await cluster.account())["day_tokens"] == 11 + 2_990 + 10


async def test_a_request_that_is_resumed_after_its_record_is_forgotten_has_events_with_other_ids(
    cluster: Cluster,
) -> None:
    await cluster.settle(await cluster.reserve(), 10, 30)
    await cluster.redis.delete(f"{LEDGER}of:r1")
    await cluster.settle(await cluster.reserve(1, 100, 30), 40, 100)
    events = await cluster.events()
    assert len({name for name, _, _ in events}) == len(events) == 2
    assert sum(input_tokens + output for _, input_tokens, output in events) == (await cluster.account())["day_tokens"]


async def test_invented_tokens_of_a_known_request_are_charged_as_output(cluster: Cluster) -> None:
    first = await cluster.reserve(output=900)
    await cluster.settle(first, 10, 1)
    resumed = await cluster.reserve(1, 900, 890)
    await cluster.settle(resumed, 0, 891)
    assert (await cluster.account())["output_tokens"] == 891


async def test_a_request_that_is_resumed_very_often_counts_as_many(cluster: Cluster) -> None:
    one = await cluster.reserve(prompt=70)
    limits = {"input_tokens_per_minute": 200}
    for _ in range(terms.FREE_RESUMES + 1):
        await cluster.leave(one, 70, 10)
        one = await cluster.reserve(1, 100, 10, prompt=70, limits=limits)
    await cluster.leave(one, 150, 10)
    assert await cluster.refused(1, 100, 10, prompt=70, limits=limits)
    await cluster.settle(one, 150, 10)
    account = await cluster.account()
    assert (account["input_tokens"], account["requests"]) == (150, 2)


async def test_a_wiped_redis_is_filled_and_closed_until_all_have_told(cluster: Cluster) -> None:
    a, b = await cluster.router("a"), await cluster.router("b")
    await cluster.settle(await cluster.reserve(1, 400), 10, 400)
    running = await cluster.reserve(2, 300, router="b")
    saved = list(a.unsaved.values())
    await cluster.redis.flushdb()
    await cluster.clock.advance(0)
    assert await cluster.closed_s(a) == 0
    a.unsaved.clear()
    await a.fill([], closes=True)
    assert await cluster.closed_s(a) == terms.RECOVERY_MS / 1e3
    assert await cluster.closed_s(b) == 0
    await b.fill([running], closes=True)
    await a.load(saved)
    await a.loaded()
    await cluster.clock.advance(terms.RECOVERY_MS)
    assert await cluster.refused(3, 400)
    await cluster.settle(running, 10, 120, "b")
    account = await cluster.account()
    assert (account["day_tokens"], account["held_day_tokens"]) == (410 + 130, 0)


@pytest.mark.parametrize("ended", [False, True])
async def test_a_resume_that_a_lost_redis_did_not_take_leaves_the_request_to_its_first_router(
    cluster: Cluster, ended: bool
) -> None:
    a, b = await cluster.router("a"), await cluster.router("b")
    first = await cluster.reserve()
    first.use(10, 42)
    await cluster.redis.flushdb()
    await cluster.clock.advance(0)
    failed = Reservation("r1", "acme", 10, 100, "{}", holder="b:1", open=not ended)
    await b.fill([failed], closes=True)
    first.open = False
    await a.fill([first], closes=True)
    await a.loaded()
    await cluster.clock.advance(terms.RECOVERY_MS)
    await b.tell([failed])
    await a.tell([first])
    resumed = await cluster.reserve(1, 100, 42, router="b")
    await cluster.settle(resumed, 10, 60, "b")
    assert (await cluster.account())["day_tokens"] == 70
    assert sum(used_input + used_output for _, used_input, used_output in await cluster.events()) == 70


async def test_a_router_whose_fill_broke_off_fills_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    router, running = await cluster.router("a"), await cluster.reserve()
    await cluster.redis.flushdb()
    await cluster.clock.advance(0)
    tell, steps = router._tell, list[str]()

    async def told_before_the_last(**parts: Any) -> Any:
        steps.append(parts["step"])
        if steps[-1] == "close":
            raise RedisConnectionError
        return await tell(**parts)

    with monkeypatch.context() as broken:
        broken.setattr(router, "_tell", told_before_the_last)
        with pytest.raises(RedisConnectionError):
            await router.fill([running], closes=True)
    assert steps == ["restart", "fill", "close"]
    assert await cluster.closed_s(router) == 0
    await router.fill([running], closes=True)
    assert (await cluster.account())["held_output_tokens"] == 100


async def test_a_redis_that_was_rolled_back_is_found_though_others_have_told_more_since(cluster: Cluster) -> None:
    a, b = await cluster.router("a"), await cluster.router("b")
    open_there = await cluster.reserve(1, 400)
    before = {key: await cluster.redis.dump(key) for key in await cluster.redis.keys(LEDGER + "*")}
    await cluster.settle(open_there, 10, 400)
    running = await cluster.reserve(2, 300)
    await cluster.redis.delete(*await cluster.redis.keys(LEDGER + "*"))
    for key, value in before.items():
        assert value is not None
        await cluster.redis.restore(key, 0, value)
    for _ in range(9):
        await b.tell([], renews=True)
    assert await cluster.closed_s(a) == 0
    await a.fill([running], closes=True)
    await a.load(list(a.unsaved.values()))
    await a.loaded()
    assert await cluster.closed_s(b) == terms.RECOVERY_MS / 1e3
    account = await cluster.account()
    assert (account["output_tokens"], account["held_output_tokens"]) == (400, 300)
    await cluster.clock.advance(terms.RECOVERY_MS)
    assert await cluster.refused(3, 400)


async def test_told_tokens_are_charged_at_once_and_have_an_event_at_the_end(cluster: Cluster) -> None:
    router, running = await cluster.router("a"), await cluster.reserve(output=900)
    for used in (40, 70):
        running.use(10, used)
        await router.tell([running], renews=True)
        await router.tell([running], renews=True)
        account = await cluster.account()
        assert (account["day_tokens"], account["held_output_tokens"], account["requests"]) == (10 + used, 900 - used, 1)
    assert await cluster.events() == []
    await cluster.leave(running, 10, 75)
    assert await cluster.events() == [("r1:0", 10, 75)]
    assert (await cluster.account())["held_output_tokens"] == 825
    await cluster.settle(running, 10, 80)
    assert await cluster.events() == [("r1:0", 10, 75), ("r1:1", 0, 5)]
    account = await cluster.account()
    assert (account["day_tokens"], account["held_output_tokens"], account["held_streams"]) == (90, 0, 0)


async def test_a_charge_whose_answer_was_lost_is_in_the_answer_when_it_is_told_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await cluster.router("a")
    ended, running = await cluster.reserve(), await cluster.reserve(2, accounts=("globex",))
    ended.use(10, 40)
    ended.open = False
    running.use(10, 20)
    with monkeypatch.context() as broken:
        broken.setattr(router, "_take", lost)
        with pytest.raises(RedisConnectionError):
            await router.tell([ended, running])
    assert not router.unsaved
    await router.tell([ended, running])
    assert {name: one.day_tokens for name, one in router.unsaved.items()} == {"acme": 50, "globex": 30}
    assert await cluster.events() == [("r1:0", 10, 40)]


async def test_a_charge_whose_router_died_before_its_answer_is_known_to_the_router_that_ends_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, running = await cluster.router("a"), await cluster.reserve()
    running.use(10, 40)
    monkeypatch.setattr(router, "_take", lost)
    with pytest.raises(RedisConnectionError):
        await router.tell([running])
    assert await cluster.renew_for(terms.HELD_MS + 8) == 1
    assert [one.day_tokens for one in (await cluster.router("b")).unsaved.values()] == [50]


def lost(_: bytes) -> None:
    """Lose the answer of a call that Redis has carried out."""
    raise RedisConnectionError


async def test_a_redis_that_comes_back_older_charges_nothing_again(cluster: Cluster) -> None:
    a, b = await cluster.router("a"), await cluster.router("b")
    first, running = await cluster.reserve(output=300), await cluster.reserve(2, 300, router="b")
    first.use(10, 38)
    await a.tell([first], renews=True)
    before = {key: await cluster.redis.dump(key) for key in await cluster.redis.keys(LEDGER + "*")}
    running.use(10, 20)
    await b.tell([running])
    await cluster.settle(first, 10, 73)  # and its router ends
    saved = [*a.unsaved.values(), *b.unsaved.values()]
    await cluster.redis.delete(*await cluster.redis.keys(LEDGER + "*"))
    for key, value in before.items():
        assert value is not None
        await cluster.redis.restore(key, 0, value)
    await b.fill([running], closes=True)
    await b.load(saved)
    await b.loaded()
    await cluster.clock.advance(terms.RECOVERY_MS)
    await cluster.settle(running, 10, 50, "b")
    await cluster.renew_for(2 * terms.HELD_MS + 8)
    account = await cluster.account()
    assert (account["day_tokens"], account["held_day_tokens"]) == (83 + 60, 0)


async def test_one_router_loads_the_accounts_and_the_ledger_opens_when_all_are_there(cluster: Cluster) -> None:
    async def unready(name: str) -> LedgerUnreadyError:
        with pytest.raises(LedgerUnreadyError) as error:
            await cluster.routers[name].tell([], renews=True)
        return error.value

    a, b = await cluster.router("a"), await cluster.router("b")
    await cluster.settle(await cluster.reserve(1, 900), 10, 900)
    (counts,) = a.unsaved.values()
    running = await cluster.reserve(2, 50, router="b")
    a.unsaved.clear()
    a._recent.clear()
    await cluster.redis.flushdb()
    await cluster.clock.advance(0)
    for router, reservations in ((a, []), (b, [running])):
        await router.fill(reservations, closes=True)
    assert (await cluster.account())["held_output_tokens"] == 50
    assert [(await unready(name)).loads for name in "ab"] == [True, False]
    await cluster.clock.advance(terms.RECOVERY_MS)
    assert (await unready("b")).closed_s == terms.LOAD_LOOK_MS / 1e3
    await a.load([Counts("other")])
    await cluster.clock.advance(terms.LOAD_MS - 4)
    assert not (await unready("b")).loads
    await cluster.clock.advance(4)  # that router has ended
    assert (await unready("b")).loads
    await b.load([counts])
    await b.loaded()
    assert await cluster.refused(3, 100)
    await cluster.settle(running, 10, 50, "b")
    assert (await cluster.account())["output_tokens"] == 950


async def test_a_call_that_fails_has_charged_nothing(cluster: Cluster) -> None:
    router, running = await cluster.router("a"), await cluster.reserve()
    await cluster.redis.hset(f"{LEDGER}routers", "dead", f"3 {cluster.clock.now_ms - 60_000}")
    await cluster.redis.set(f"{LEDGER}held:dead", "x")
    running.use(10, 60)
    with pytest.raises(ResponseError):
        await router.tell([running], renews=True)
    assert (await cluster.account())["day_tokens"] == 0
    await cluster.redis.delete(f"{LEDGER}held:dead")
    await cluster.settle(running, 10, 60)
    assert (await cluster.account())["day_tokens"] == 70
    assert await cluster.events() == [("r1:0", 10, 60)]


async def test_counts_of_accounts_only_grow_when_they_are_filled(cluster: Cluster) -> None:
    await cluster.settle(await cluster.reserve(1), 10, 100)
    ledger = await cluster.router("a")
    counts = ledger.unsaved["acme"]
    lower = msgspec.structs.replace(counts, output_tokens=5, day_tokens=500)
    await ledger.load([lower, Counts("other", day=counts.day, day_tokens=7)])
    account = await cluster.account()
    assert (account["output_tokens"], account["day_tokens"], account["month_tokens"]) == (100, 500, 110)
    assert (await cluster.account("other"))["day_tokens"] == 7


async def test_accounts_of_the_store_that_redis_has_by_now_are_not_written_again(cluster: Cluster) -> None:
    ledger, day = await cluster.router("a"), cluster.clock.now_ms // 86_400_000
    saved = [Counts(f"t{number}", day=day, day_tokens=number) for number in range(300)]
    await cluster.redis.config_resetstat()
    await ledger.load(saved)
    await ledger.load(saved)
    stats: Any = await cluster.redis.info("commandstats")
    assert [stats[f"cmdstat_{command}"]["calls"] for command in ("fcall", "set")] == [2, 300]
    await ledger.load([*saved[1:], Counts("t0", day=day + 1, day_tokens=1), Counts("t1", day=day - 1, day_tokens=9)])
    assert [(await cluster.account(f"t{number}"))["day_tokens"] for number in range(3)] == [1, 1, 2]


async def test_a_reservation_of_a_full_month_of_routers_costs_no_look_at_accounts(cluster: Cluster) -> None:
    """An idle router costs a call a second, however many accounts there are."""
    for number in range(500):
        await cluster.settle(await cluster.reserve(number, accounts=(f"t{number}",)), 10, 5)
    router = await cluster.router("a")
    await router.tell([], renews=True)
    before: Any = await cluster.redis.info("commandstats")
    await router.tell([], renews=True)
    after: Any = await cluster.redis.info("commandstats")
    calls = {name: after[name]["calls"] - before.get(name, {"calls": 0})["calls"] for name in after}
    assert sum(calls.values()) < 20, calls


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_the_accounts_are_the_sums_of_their_events_and_limits_hold(
    cluster: Cluster, seed: int
) -> None:
    chance = Random(seed)
    # The request of the most tokens costs 181,500: the budget, too, is reached by some.
    limits = {"tokens_per_day": 2_000, "concurrent_streams": 6, "budget_per_month": 1_100_000}
    open_ones: dict[str, tuple[Reservation, str]] = {}
    ended: dict[str, Reservation] = {}
    for number in range(150):
        router = chance.choice("abc")
        act = chance.random()
        try:
            if act < 0.4:
                output = chance.randint(0, 300)
                one = await cluster.reserve(number, output, router=router, limits=limits, prices=PRICES)
                open_ones[one.id] = one, router
            elif act < 0.7 and open_ones:
                one, router = open_ones.pop(chance.choice(sorted(open_ones)))
                await cluster.settle(one, 10, chance.randint(0, one.output), router, chance.randint(0, 10))
                ended[one.id] = one
            elif act < 0.85 and (open_ones or ended):
                known = {**ended, **{name: one for name, (one, _) in open_ones.items()}}
                one = known[chance.choice(sorted(known))]
                received = chance.randint(0, one.used_output + 20)
                again = await cluster.reserve(
                    int(one.id[1:]), one.output, received, router=router, limits=limits, prices=PRICES
                )
                open_ones[one.id] = again, router
                ended.pop(one.id, None)
            else:
                await cluster.clock.advance(chance.choice((10, 1_000, terms.HELD_MS // 2)))
                mine = [one for one, of in open_ones.values() if of == router]
                for one in mine:
                    one.use(
                        10, chance.randint(one.used_output, max(one.used_output, one.output)), chance.randint(0, 10)
                    )
                await (await cluster.router(router)).tell(mine, renews=True)
        except QuotaReachedError:
            continue
        finally:
            account = await cluster.account()
            assert account.get("day_tokens", 0) + account.get("held_day_tokens", 0) <= 2_000 + 300 * 9, account
            assert account["month_cost"] + account["held_month_cost"] <= 1_100_000 + 300 * 600 * 9, account
    for one, router in open_ones.values():
        await cluster.settle(one, 0, 0, router)
    await cluster.renew_for(2 * terms.HELD_MS + 8, "d")
    account = await cluster.account()
    assert account["day_tokens"] == sum(size + made for _, size, made in await cluster.events())
    assert (account["month_cost"], account["month_cost"]) == await cluster.cost()
    assert (account["minute_cost"] <= account["day_cost"], account["held_month_cost"]) == (True, 0)
    assert (account["held_day_tokens"], account["held_requests"], account["held_streams"]) == (0, 0, 0)
    assert len({name for name, _, _ in await cluster.events()}) == len(await cluster.events())


@pytest.mark.parametrize(
    ("limit", "left", "end"),
    [
        ("requests_per_minute", 998, None),
        ("output_tokens_per_minute", 800, None),
        ("tokens_per_day", 780, datetime(2026, 12, 31, tzinfo=UTC)),
        ("tokens_per_month", 780, datetime(2027, 1, 1, tzinfo=UTC)),
    ],
)
async def test_a_reservation_says_what_is_left(cluster: Cluster, limit: str, left: int, end: datetime | None) -> None:
    await cluster.clock.advance(int(datetime(2026, 12, 30, 12, tzinfo=UTC).timestamp() * 1e3) - cluster.clock.now_ms)
    settled = await cluster.reserve(1, limits={limit: 1000})
    await cluster.settle(settled, 10, 100)
    granted = await cluster.reserve(2, limits={limit: 1000, "concurrent_streams": 9})
    (room,) = granted.room
    ends_ms = 60_000 if end is None else int(end.timestamp() * 1e3) - cluster.clock.now_ms
    assert (room.limit, room.most, room.left, room.ends_s) == (limit, 1000, left, ends_ms / 1e3)


async def test_what_was_cached_is_charged_at_its_price_and_the_rest_of_the_reservation_comes_back(
    cluster: Cluster,
) -> None:
    one = await cluster.reserve(prices=PRICES, limits={"budget_per_month": 61_500})
    assert (await cluster.account())["held_month_cost"] == 10 * 150 + 100 * 600
    assert await cluster.refused(2, 0, prices=PRICES, limits={"budget_per_month": 61_500}) == (
        f"budget_per_month {(await month_left_ms(cluster))}"
    )
    await cluster.settle(one, 10, 40, cached=4)
    cost = 6 * 150 + 4 * 75 + 40 * 600
    account = await cluster.account()
    costs = [account[f"{name}_cost"] for name in ("minute", "day", "month", "held_month")]
    assert (costs, await cluster.cost()) == ([cost, cost, cost, 0], (cost, cost))


async def month_left_ms(cluster: Cluster) -> int:
    now = datetime.fromtimestamp(cluster.clock.now_ms / 1e3, UTC)
    begins = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
    return int(begins.timestamp() * 1e3) - cluster.clock.now_ms


async def test_fifty_calls_at_once_at_a_budget_of_one_more_pass_as_one(cluster: Cluster) -> None:
    """Two routers, whose calls come in any order: what is left is reserved by one of them, to the nano-unit."""
    limits = {"budget_per_month": 2 * 61_500}
    await cluster.settle(await cluster.reserve(prices=PRICES, limits=limits), 10, 100)
    await cluster.router("b")
    calls = (
        cluster.reserve(number, prices=PRICES, limits=limits, router="ab"[number % 2]) for number in range(100, 150)
    )
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in ends if not isinstance(one, QuotaReachedError)] == [Reservation]
    assert (await cluster.account())["held_month_cost"] == 61_500


async def test_a_request_keeps_the_prices_of_its_beginning(cluster: Cluster) -> None:
    one = await cluster.reserve(prices=PRICES)
    await cluster.leave(one, 10, 40)
    again = await cluster.reserve(received=40, prices=(1, 1, 1), router="b")
    await cluster.settle(again, 10, 100, "b")
    cost = 10 * 150 + 100 * 600
    assert ((await cluster.account())["month_cost"], await cluster.cost()) == (cost, (cost, cost))


async def test_calls_whose_tokens_cost_nothing_pass_a_budget_that_is_spent(cluster: Cluster) -> None:
    limits = {"budget_per_month": 61_500}
    await cluster.settle(await cluster.reserve(prices=PRICES, limits=limits), 10, 100)
    assert (await cluster.refused(2, prices=PRICES, limits=limits)).startswith("budget_per_month ")
    assert (await cluster.reserve(3, limits=limits)).open


@pytest.mark.parametrize("is_told", [True, False])
async def test_the_money_of_a_router_that_died_is_that_of_its_event(cluster: Cluster, is_told: bool) -> None:
    one = await cluster.reserve(prices=PRICES)
    if is_told:
        one.use(10, 40, 4)
        await (await cluster.router("a")).tell([one], renews=True)
        await (await cluster.router("a")).tell([one], renews=True)  # its first answer was lost
    await cluster.renew_for(2 * terms.HELD_MS + 8)
    cost = 6 * 150 + 4 * 75 + 40 * 600 if is_told else 0
    account = await cluster.account()
    assert (account["month_cost"], account["held_month_cost"], await cluster.cost()) == (cost, 0, (cost, cost))


async def test_a_wiped_redis_has_the_costs_again(cluster: Cluster) -> None:
    """From its router's reservations, and from the accounts and events of the last seconds."""
    settled = await cluster.reserve(1, prices=PRICES)
    await cluster.settle(settled, 10, 40, cached=4)
    running = await cluster.reserve(2, prices=PRICES)
    running.use(10, 30, 8)
    a = await cluster.router("a")
    await a.tell([running], renews=True)
    before = await cluster.account()
    await cluster.redis.flushdb()
    await cluster.clock.advance(0)
    with pytest.raises(LedgerUnreadyError):
        await a.tell([])
    await a.fill([running], closes=True)
    await cluster.clock.advance(terms.RECOVERY_MS)
    await a.load([])
    await a.loaded()
    after = await cluster.account()
    assert {name: after[name] for name in before if "cost" in name} == {
        name: count for name, count in before.items() if "cost" in name
    }
    await cluster.settle(running, 10, 50, cached=10)
    cost = 6 * 150 + 4 * 75 + 40 * 600 + 2 * 150 + 8 * 75 + 50 * 600
    assert ((await cluster.account())["month_cost"], await cluster.cost()) == (cost, (cost, cost))
