"""The ledger on Redis: quotas, ends, takeovers, lost data; the scripts and their model decide the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from random import Random

import pytest
from redis.asyncio import Redis

from bench.ledger_model import LedgerModel
from broker import ledger_terms as terms
from broker.keys import ledger_prefix
from broker.ledger import BehindError, Ledger, QuotaReachedError
from broker.ledger_records import AccountCopy, Look, Reservation, TokenLimits
from tests.broker.scripts_clock import SCRIPTS_ON_TEST_CLOCK, START_MS, Clock

LIMITS = TokenLimits(output_tokens_per_minute=1000)
NEW = AccountCopy()


@dataclass
class Both:
    """A ledger on Redis and its model, on the tests' clock; each call goes to both and must answer the same."""

    ledger: Ledger
    model: LedgerModel
    clock: Clock
    seen: AccountCopy = NEW

    async def reserve(
        self,
        wanted: Reservation,
        received: int | None = None,
        limits: TokenLimits = LIMITS,
        seen: AccountCopy | None = None,
    ) -> Reservation | str:
        """Return what was granted, or why not."""
        copy = self.seen if seen is None else seen
        answers: list[tuple[Reservation, AccountCopy] | str] = []
        for real in (True, False):
            try:
                if real:
                    answers.append(await self.ledger.reserve("acme", wanted, received, limits, copy))
                else:
                    answers.append(self.model.reserve("acme", wanted, received, limits, copy, self.clock.now_ms))
            except QuotaReachedError as error:
                answers.append(f"{error.limit} {error.wait_ms}")
            except BehindError:
                answers.append("behind")
        assert answers[0] == answers[1]
        if isinstance(answers[0], str):
            return answers[0]
        self.seen = answers[0][1]
        return answers[0][0]

    async def granted(self, wanted: Reservation, received: int | None = None) -> Reservation:
        """Reserve what must be granted."""
        granted = await self.reserve(wanted, received)
        assert isinstance(granted, Reservation)
        return granted

    async def settle(self, reservation: Reservation, state: str = "finished", seen: AccountCopy | None = None) -> bool:
        """End a reservation; False: the account is behind."""
        copy = self.seen if seen is None else seen
        try:
            expected = self.model.settle("acme", reservation, state, copy, self.clock.now_ms)
        except BehindError:
            with pytest.raises(BehindError):
                await self.ledger.settle("acme", reservation, state, copy)
            return False
        assert await self.ledger.settle("acme", reservation, state, copy) == expected
        self.seen = expected[0]
        return True

    async def look(self, *renewed: Reservation, seen: AccountCopy | None = None) -> Look:
        """Look, and renew some."""
        copy = self.seen if seen is None else seen
        look = await self.ledger.look("acme", copy, renewed)
        expected = self.model.look("acme", copy, renewed, self.clock.now_ms)
        drawn = set(look.charges)
        if len(drawn) == terms.CHARGES_PER_LOOK:  # by chance
            assert drawn <= set(expected.charges)
        else:
            assert drawn == set(expected.charges)
        assert replace(look, charges=()) == replace(expected, charges=())
        self.seen = look.account
        await self.ledger.acknowledge("acme", [charge.id for charge in look.charges] or [""])
        self.model.acknowledge("acme", [charge.id for charge in look.charges])
        return look

    async def look_for(self, ms: int) -> Look:
        """Let time pass, with looks as often as routers make them; return the last one."""
        for _ in range(4):
            await self.clock.advance(ms // 4)
            look = await self.look()
        return look

    async def lose_data(self, redis: Redis) -> None:
        """Remove all of Redis's data but the clock."""
        await redis.flushdb()
        await self.clock.advance(0)
        self.model = LedgerModel(reports=True)


@pytest.fixture
async def both(redis: Redis, clock: Clock) -> Both:
    both = Both(Ledger(redis, SCRIPTS_ON_TEST_CLOCK, reports=True), LedgerModel(reports=True), clock)
    await both.look()
    await clock.advance(terms.RECOVERY_MS)
    return both


def request(number: int = 1, output: int = 100, owner: str = "a", given: int = 10) -> Reservation:
    return Reservation(f"r{number}", owner, input=given, output=output)


async def test_a_limit_is_not_passed_and_has_room_in_the_next_minute(both: Both) -> None:
    for number in range(10):
        await both.granted(request(number))
    left_ms = 60_000 - both.clock.now_ms % 60_000
    assert await both.reserve(request(10)) == f"output_tokens_per_minute {left_ms}"
    assert await both.reserve(request(10, output=1001)) == "output_tokens_per_minute None"
    await both.clock.advance(left_ms)
    await both.granted(request(10))


async def test_what_was_not_used_comes_back_once(both: Both) -> None:
    granted = await both.granted(request(output=900))
    used = replace(granted, used_input=10, used_output=40)
    for _ in range(3):
        await both.settle(used)
    assert (both.seen.output, both.seen.input, both.seen.requests, both.seen.day_tokens) == (40, 10, 1, 50)
    nothing = await both.granted(request(2))
    await both.settle(nothing, "ended")
    assert (both.seen.output, both.seen.input, both.seen.requests, both.seen.month_tokens) == (40, 10, 1, 50)


@pytest.mark.parametrize("limit", ["streams", "requests_per_minute", "input_tokens_per_minute", "tokens_per_day"])
async def test_each_limit_refuses(both: Both, limit: str) -> None:
    most = {"streams": 2, "requests_per_minute": 2, "input_tokens_per_minute": 20, "tokens_per_day": 220}
    limits = replace(TokenLimits(), **{limit: most[limit]})
    first = await both.reserve(request(1), limits=limits)
    assert isinstance(first, Reservation)
    assert isinstance(await both.reserve(request(2), limits=limits), Reservation)
    refused = await both.reserve(request(3), limits=limits)
    assert isinstance(refused, str)
    assert refused.startswith(limit)
    if limit == "streams":
        await both.settle(first)
        assert isinstance(await both.reserve(request(3), limits=limits), Reservation)


@pytest.mark.parametrize("day", ["2026-01-31", "2026-02-28", "2028-02-29", "2026-12-31", "2100-02-28", "2027-06-15"])
async def test_months_and_days_end_by_utc(redis: Redis, clock: Clock, day: str) -> None:
    begin_ms = round(datetime.fromisoformat(f"{day}T23:59:50").replace(tzinfo=UTC).timestamp() * 1e3)
    await clock.advance(begin_ms - clock.now_ms)
    both = Both(Ledger(redis, SCRIPTS_ON_TEST_CLOCK), LedgerModel(), clock)
    await both.look()
    await clock.advance(terms.RECOVERY_MS)
    limits = TokenLimits(tokens_per_month=150)
    assert isinstance(await both.reserve(request(1), limits=limits), Reservation)
    assert isinstance(await both.reserve(request(2), limits=limits), str)
    await clock.advance(10_000)
    await both.look()
    if day[-2:] in {"31", "28", "29"} and day != "2028-02-28":
        assert isinstance(await both.reserve(request(2), limits=limits), Reservation)


async def test_a_dead_routers_reservation_ends_with_its_last_count(both: Both) -> None:
    granted = await both.granted(request())
    await both.look(replace(granted, used_input=10, used_output=30))
    assert not (await both.look_for(terms.HELD_MS - 4)).expired
    await both.clock.advance(4)
    assert (await both.look()).expired == 1
    assert both.seen.output in {30, 0}  # the minute may have passed
    assert both.seen.day_tokens == 40
    # The router only stood still: what it has sent meanwhile is added.
    await both.settle(replace(granted, used_input=10, used_output=55))
    assert both.seen.day_tokens == 65


async def test_after_an_outage_routers_have_the_time_to_renew(both: Both) -> None:
    running = await both.granted(request())
    gone = await both.granted(request(2))
    await both.clock.advance(3 * terms.HELD_MS)
    assert not (await both.look()).expired
    await both.look(running)
    for _ in range(4):
        await both.clock.advance(terms.HELD_MS // 4)
        look = await both.look(running)
    assert look.expired == 1
    await both.settle(replace(gone, used_input=10, used_output=5))
    await both.settle(replace(running, used_input=10, used_output=20))
    assert both.seen.day_tokens == 45


async def test_a_resumed_request_keeps_its_reservation_and_is_charged_once(both: Both) -> None:
    granted = await both.granted(request(output=900))
    await both.settle(replace(granted, used_input=10, used_output=17), "left")
    assert isinstance(await both.reserve(request(2, output=200)), str)
    resumed = await both.granted(request(output=900, owner="b"), received=12)
    assert resumed.input == 10
    # The first router's late end is not the request's any more.
    await both.settle(replace(granted, used_input=10, used_output=17), "ended")
    await both.settle(replace(resumed, used_input=10, used_output=60))
    assert (both.seen.input, both.seen.output, both.seen.requests) == (10, 60, 1)


async def test_a_request_whose_second_router_dies_too_is_charged_for_what_its_client_had(both: Both) -> None:
    granted = await both.granted(request())
    await both.look(replace(granted, used_input=10, used_output=17))
    await both.granted(request(owner="b"), received=30)
    assert (await both.look_for(terms.HELD_MS)).expired == 1
    assert both.seen.day_tokens == 40


async def test_a_resumed_request_that_was_left_before_it_was_reserved_is_checked_and_charged(both: Both) -> None:
    wanted = request(output=900, owner="b")
    await both.settle(wanted, "left")  # its call ended before the ledger had heard of it
    await both.granted(request(2, output=200))
    assert isinstance(await both.reserve(wanted, received=20), str)
    smaller = replace(wanted, output=500)
    await both.settle(smaller, "left")
    resumed = await both.granted(smaller, received=20)
    await both.settle(replace(resumed, used_output=300))
    assert both.seen.output == 200 + 280


async def test_a_reservation_that_comes_after_its_end_holds_nothing(both: Both, redis: Redis) -> None:
    wanted = request(output=900)
    await both.settle(wanted, "ended")  # the call was cancelled, and the server had not got to its reservation yet
    await both.granted(wanted)
    assert both.seen.output == 0
    assert not await redis.exists(ledger_prefix("acme") + "held")
    await both.granted(request(2, output=900))


async def test_a_charge_is_kept_until_it_is_reported(both: Both) -> None:
    granted = await both.granted(replace(request(), subject="begun"))
    await both.settle(replace(granted, subject="done", used_input=10, used_output=70))
    died = await both.granted(replace(request(2), subject="begun"))
    await both.look(replace(died, used_input=10, used_output=30))
    await both.clock.advance(terms.REPORT_AFTER_MS)
    charges = (await both.look()).charges
    assert [(one.id, one.input, one.output, one.subject) for one in charges] == [("r1:0", 10, 70, "done")]
    await both.look_for(terms.HELD_MS)
    await both.clock.advance(terms.REPORT_AFTER_MS)
    charges = (await both.look()).charges
    assert [(one.id, one.input, one.output, one.subject) for one in charges] == [("r2:0", 10, 30, "begun")]
    await both.clock.advance(terms.REPORT_AFTER_MS)
    assert not (await both.look()).charges


async def test_a_charge_of_nested_arrays_ends_no_router_that_draws_it(both: Both, redis: Redis) -> None:
    nested = b'{"input": 1, "output": 1, "at_ms": 0, "subject": "", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    await redis.hset(ledger_prefix("acme") + "unreported", "r1:0", nested)
    assert (await both.ledger.look("acme", both.seen)).charges == ()


async def test_a_request_resumed_late_needs_room_and_is_charged_for_its_rest_alone(both: Both) -> None:
    granted = await both.granted(request(output=600))
    await both.settle(replace(granted, used_input=10, used_output=100), "left")
    await both.look_for(terms.LINGER_MS)
    assert both.seen.output == 100
    other = await both.granted(request(2, output=600))
    assert isinstance(await both.reserve(request(output=600, owner="b"), received=90), str)
    await both.settle(replace(other, used_output=300))
    resumed = await both.granted(request(output=600, owner="b"), received=90)
    assert (resumed.base, resumed.output, resumed.input) == (100, 500, 0)
    await both.settle(replace(resumed, used_output=600))
    assert (both.seen.output, both.seen.requests) == (300 + 600, 2)


async def test_an_answer_that_is_made_again_and_again_is_charged_again(both: Both) -> None:
    """A client that says it has nothing of what it got has other tokens made each time, if it alters what it has."""
    granted = await both.granted(request(output=300))
    made = replace(granted, used_input=10, used_output=300)
    await both.settle(made)
    refused = ""
    for _ in range(4):
        resumed = await both.reserve(request(output=300), received=0)
        if isinstance(resumed, str):
            refused = resumed
            break
        await both.settle(replace(resumed, used_output=300))
        assert both.seen.output <= LIMITS.output_tokens_per_minute  # type: ignore[operator]
    assert refused.startswith("output_tokens_per_minute")
    assert both.seen.output >= 900
    assert both.seen.day_tokens == 10 + both.seen.output


async def test_few_tokens_that_a_lost_link_took_are_made_again_without_a_charge(both: Both) -> None:
    one = await both.granted(request(output=300))
    for received in (20, 50, 90):
        await both.settle(replace(one, used_input=10, used_output=received + 8), "left")
        one = await both.granted(request(output=300), received=received)
    await both.settle(replace(one, used_input=10, used_output=300))
    assert (both.seen.output, both.seen.input, both.seen.requests) == (300, 10, 1)


async def test_an_answer_that_is_complete_holds_what_it_may_still_become(both: Both) -> None:
    """A client that alters the last token it has gets an answer that goes on."""
    for number in range(4):
        granted = await both.granted(request(number, output=600))
        await both.settle(replace(granted, used_input=10, used_output=10))
    await both.granted(request(0, output=600), received=10)
    for number in range(1, 4):
        assert isinstance(await both.reserve(request(number, output=600), received=10), str)


async def test_a_request_that_the_ledger_has_forgotten_is_charged_with_its_prompt(both: Both, redis: Redis) -> None:
    granted = await both.granted(request(output=100))
    await both.settle(replace(granted, used_input=10, used_output=100))
    await both.look_for(terms.ENDED_RECORD_MS)
    await redis.delete(ledger_prefix("acme") + "of:r1")  # whose end is by the server's own clock
    resumed = await both.granted(request(output=100), received=99)
    assert (resumed.input, resumed.output) == (10, 1)


async def test_a_request_that_is_resumed_very_often_counts_as_many(both: Both) -> None:
    one = await both.granted(request(output=100, given=70))
    limits = TokenLimits(input_tokens_per_minute=200)
    for _ in range(terms.FREE_RESUMES + 1):
        await both.settle(replace(one, used_input=one.input, used_output=10), "left")
        resumed = await both.reserve(request(output=100, given=70), 10, limits)
        assert isinstance(resumed, Reservation)
        one = resumed
    await both.settle(replace(one, used_input=one.input, used_output=10), "left")
    assert isinstance(await both.reserve(request(output=100, given=70), 10, limits), str)
    assert (both.seen.input, both.seen.requests) == (140, 2)


async def test_what_a_router_sent_after_its_request_went_to_another_is_charged(both: Both) -> None:
    granted = await both.granted(request(output=800))
    elsewhere = await both.granted(request(output=800, owner="b"), received=0)
    await both.settle(replace(elsewhere, used_output=0))  # its client says that it has all of it
    assert (await both.look(granted)).moved == ("r1",)
    for _ in range(2):
        await both.settle(replace(granted, used_input=10, used_output=700), "left")
    assert both.seen.output == 700
    again = await both.granted(request(2, output=200, owner="b"))
    moved = await both.granted(request(2, output=200, owner="a"), received=0)
    await both.settle(replace(again, used_input=10, used_output=200), "left")  # few enough to be made again
    await both.settle(replace(moved, used_input=10, used_output=200))
    assert both.seen.output == 900


async def test_calls_that_are_left_and_resumed_do_not_multiply_streams(both: Both) -> None:
    limits = TokenLimits(streams=2)
    left: list[Reservation] = []
    for number in range(6):
        one = await both.reserve(request(number), limits=limits)
        assert isinstance(one, Reservation)
        await both.settle(replace(one, used_input=10, used_output=5), "left" if number < 5 else "finished")
        left.append(one)
    for one in left[:4]:  # as many again as may begin
        assert isinstance(await both.reserve(one, 5, limits), Reservation)
    for one in left[4:]:
        assert await both.reserve(one, 5, limits) == f"streams {terms.STREAM_RETRY_MS}"


async def test_lost_data_is_put_back_from_a_routers_copy(both: Both, redis: Redis) -> None:
    done = await both.granted(request(1))
    await both.settle(replace(done, used_input=10, used_output=100))
    running = await both.granted(request(2, output=300))
    seen = both.seen
    await both.lose_data(redis)
    assert await both.reserve(request(3)) == "behind"
    assert not await both.settle(replace(running, used_output=20), seen=seen)
    assert (await both.look(running)).refilled
    assert (both.seen.output, both.seen.requests) == (400, 2)
    await both.settle(replace(running, used_input=10, used_output=20))
    assert both.seen.output == 120


async def test_a_new_account_grants_a_request_and_little_more_before_routers_have_told(
    both: Both, redis: Redis
) -> None:
    await both.lose_data(redis)
    assert isinstance(await both.reserve(request(1), seen=NEW), Reservation)
    refused = await both.reserve(request(2))
    assert refused == f"output_tokens_per_minute {terms.RECOVERY_MS}"
    await both.clock.advance(terms.RECOVERY_MS)
    await both.granted(request(2))


class Walk:
    """Random calls of three routers, the same call again, requests that move, and lost data."""

    LIMITS = TokenLimits(streams=6, output_tokens_per_minute=700, tokens_per_day=5_000)

    def __init__(self, both: Both, redis: Redis, seed: int) -> None:
        self.both = both
        self.redis = redis
        self.chance = Random(seed)
        self.copies = dict.fromkeys("abc", both.seen)
        self.held: dict[str, dict[str, Reservation]] = {name: {} for name in "abc"}
        self.used: dict[str, int] = {}

    async def step(self) -> None:
        name, draw = self.chance.choice("abc"), self.chance.random()
        key = self.chance.choice([*self.held[name], ""])
        if draw < 0.4:
            await self.reserve(name)
        elif draw < 0.7 and key:
            one = self.held[name].pop(key)
            await self.settle(name, self.more_used(one), self.chance.choice((1, 1, 2)))
        elif draw < 0.8 and key:
            self.held[name][key] = self.more_used(self.held[name][key])
        elif draw < 0.83 and key:
            await self.move(name, key)
        elif draw < 0.85:
            await self.look_at_all()
            await self.both.lose_data(self.redis)
            await self.look_at_all()
        else:
            await self.both.clock.advance(self.chance.randint(0, 900))
            await self.look_at_all()

    def more_used(self, one: Reservation) -> Reservation:
        return replace(one, used_input=10, used_output=self.chance.randint(one.used_output, one.output))

    async def look(self, name: str) -> None:
        await self.both.look(*self.held[name].values(), seen=self.copies[name])
        self.copies[name] = self.both.seen

    async def look_at_all(self) -> None:
        for name in "abc":
            await self.look(name)

    async def reserve(self, name: str) -> None:
        wanted = request(len(self.used), output=self.chance.randint(1, 120), owner=name)
        got = await self.both.reserve(wanted, limits=self.LIMITS, seen=self.copies[name])
        if got == "behind":
            await self.look(name)
        elif isinstance(got, Reservation):
            self.held[name][got.id], self.used[got.id] = got, 0
            if self.chance.random() < 0.3:  # its answer was lost
                assert await self.both.reserve(wanted, limits=self.LIMITS, seen=self.copies[name]) == got
            self.copies[name] = self.both.seen

    async def settle(self, name: str, end: Reservation, times: int) -> None:
        for _ in range(times):
            while not await self.both.settle(end, seen=self.copies[name]):
                await self.look(name)
            self.copies[name] = self.both.seen
        self.used[end.id] = end.used_input + end.used_output

    async def move(self, name: str, key: str) -> None:
        one, other = self.held[name].pop(key), self.chance.choice([one for one in "abc" if one != name])
        await self.look(other)
        moved = await self.both.reserve(replace(one, owner=other), 0, self.LIMITS, self.copies[other])
        assert isinstance(moved, Reservation)
        self.copies[other] = self.both.seen
        self.held[other][key] = replace(moved, used_input=one.used_input, used_output=one.used_output)


@pytest.mark.parametrize("seed", range(2))
async def test_each_token_is_charged_once_whatever_happens(both: Both, redis: Redis, seed: int) -> None:
    """The account keeps to its limits, and in the end has what was used of every request."""
    walk = Walk(both, redis, seed)
    print(f"seed {seed}")
    for _ in range(90):
        await walk.step()
        assert both.seen.output <= 700
        assert both.seen.day_tokens <= 5_000
    for name, mine in walk.held.items():
        while mine:
            _, one = mine.popitem()
            await walk.settle(name, replace(one, used_input=10, used_output=one.output), 1)
    assert both.seen.day == START_MS // 86_400_000
    assert both.seen.day_tokens == sum(walk.used.values())
