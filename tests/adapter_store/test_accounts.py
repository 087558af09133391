"""Accounts at a real store: what routers save is merged by window, outlives a restart, and goes when it is over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest

from loraplex.adapter_store.accounts import Row, StoredAccounts
from loraplex.adapter_store.app import Store
from loraplex.adapter_store.database import Database
from loraplex.admin.v1 import accounts_pb2 as pb
from loraplex.admin.v1 import accounts_pb2_grpc, tenants_pb2, tenants_pb2_grpc
from loraplex.contracts.plans import windows_at

# Noon of the last day of a year: the next day is in another month.
NOON = int(datetime(2026, 12, 31, 12, tzinfo=UTC).timestamp()) * 1000
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.ms = NOON

    def now_ns(self) -> int:
        return self.ms * 1_000_000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def saved(database: Database, clock: Clock) -> StoredAccounts:
    """The catalog's accounts, with a clock of their own."""
    return StoredAccounts(database, clock.now_ns)


@pytest.fixture
async def accounts(store: Store) -> AsyncIterator[Any]:
    """A stub of the store's AccountService."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        yield accounts_pb2_grpc.AccountServiceStub(channel)


def row(at_ms: int, count: int, name: str = "acme") -> Row:
    """Return an account at a time whose counts are all the same."""
    counts = ("requests", "input_tokens", "output_tokens", "day_tokens", "month_tokens")
    costs = ("minute_cost", "day_cost", "month_cost")
    return {"name": name, **windows_at(at_ms), **dict.fromkeys(counts, count), **dict.fromkeys(costs, 7 * count)}


def counts(saved: StoredAccounts) -> tuple[object, ...]:
    """Return the requests of the minute, the tokens of the day and those of the month of the only account."""
    (account,) = saved.page("", 10)
    assert account["input_tokens"] == account["output_tokens"] == account["requests"] == account["minute_cost"] // 7
    assert (account["day_cost"], account["month_cost"]) == (7 * account["day_tokens"], 7 * account["month_tokens"])
    return account["requests"], account["day_tokens"], account["month_tokens"]


async def refused(call: Any) -> str:
    """Return the message with which a call is refused as INVALID_ARGUMENT."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


def test_windows_are_numbered_by_utc() -> None:
    assert windows_at(0) == {"minute": 0, "day": 0, "month": 12 * 1970}
    assert windows_at(NOON)["month"] == 12 * 2026 + 11
    assert windows_at(NOON + DAY) == {"minute": NOON // MINUTE + 1440, "day": NOON // DAY + 1, "month": 12 * 2027}


@pytest.mark.parametrize(
    ("later_ms", "count", "merged"),
    [
        (0, 7, (7, 7, 7)),
        (0, 3, (5, 5, 5)),
        (MINUTE, 3, (3, 5, 5)),
        (MINUTE, 7, (7, 7, 7)),
        (-MINUTE, 7, (5, 7, 7)),
        (-DAY, 7, (5, 5, 7)),
        (-40 * DAY, 7, (5, 5, 5)),
        (DAY, 3, (3, 3, 3)),
    ],
)
def test_a_later_window_replaces_and_of_one_window_the_higher_count_stays(
    saved: StoredAccounts, later_ms: int, count: int, merged: tuple[int, ...]
) -> None:
    saved.save([row(NOON, 5)])
    saved.save([row(NOON + later_ms, count)])
    assert counts(saved) == merged


def test_each_count_of_a_window_is_the_higher_one(saved: StoredAccounts) -> None:
    saved.save([{**row(NOON, 5), "requests": 9}, {**row(NOON, 6), "requests": 8, "day_tokens": 2, "day_cost": 1}])
    (account,) = saved.page("", 10)
    assert account == {**row(NOON, 6), "requests": 9, "day_tokens": 5, "day_cost": 35}


@pytest.mark.parametrize("ahead_ms", [10 * MINUTE, DAY, 1000 * DAY])
def test_a_clock_that_was_ahead_does_not_close_an_account(saved: StoredAccounts, clock: Clock, ahead_ms: int) -> None:
    clock.ms = NOON + DAY // 2 - 2 * MINUTE  # ten minutes later it is another month
    saved.save([row(clock.ms + ahead_ms, 5)])
    assert counts(saved) == (5, 5, 5)
    saved.save([row(clock.ms + ahead_ms, 3)])
    assert counts(saved) == (5, 5, 5)
    saved.save([row(clock.ms, 2)])
    assert counts(saved) == (2, 2, 2)


def test_clocks_that_differ_by_seconds_lose_nothing(saved: StoredAccounts, clock: Clock) -> None:
    clock.ms = NOON + DAY // 2 - 1  # the store's clock is the last one that has the new month
    saved.save([row(clock.ms + 1, 5)])
    saved.save([row(clock.ms, 7)])
    assert counts(saved) == (5, 5, 5)


def test_accounts_go_a_day_after_their_windows(saved: StoredAccounts, clock: Clock, database: Database) -> None:
    saved.save([row(NOON, 5)])
    clock.ms = NOON + DAY + DAY // 2 - 1
    assert counts(saved) == (5, 5, 5)
    clock.ms += 1
    assert saved.page("", 10) == []
    saved.save([row(clock.ms, 1, "globex")])
    assert [account["name"] for account in saved.page("", 10)] == ["globex"]
    with database.reading() as rows:
        assert [name for (name,) in rows.execute("SELECT name FROM accounts")] == ["globex"]


def test_passed_accounts_are_looked_for_once_an_hour(saved: StoredAccounts, clock: Clock, database: Database) -> None:
    saved.save([])
    for later_ms, kept in ((HOUR - 1, 1), (HOUR, 0)):
        clock.ms = NOON + later_ms
        saved.save([row(NOON - 40 * DAY, 5)])
        with database.reading() as rows:
            assert rows.execute("SELECT count(*) FROM accounts").fetchone()[0] == kept


async def test_a_batch_of_a_thousand_is_there_after_a_restart_in_pages(accounts: Any, store: Store) -> None:
    now: Any = windows_at(StoredAccounts(store._database)._now_ms())
    batch = [pb.Account(name=f"tenant{at:04}", month_tokens=at, **now) for at in range(998)]
    batch += [pb.Account(name="keys/0123456789abcdef", requests=2**53 - 1, **now), pb.Account(name="acme", **now)]
    await accounts.SaveAccounts(pb.SaveAccountsRequest(accounts=batch))
    await store.stop(drain_s=0)
    await store.start()
    found: list[pb.Account] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        stub: Any = accounts_pb2_grpc.AccountServiceStub(channel)
        page = await stub.ListAccounts(pb.ListAccountsRequest())
        assert len(page.accounts) == 100
        request = pb.ListAccountsRequest(page_size=400)
        while request.page_token or not found:
            page = await stub.ListAccounts(request)
            found += page.accounts
            request.page_token = page.next_page_token
    assert found == sorted(batch, key=lambda account: account.name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "ACME"}, "accounts[1].name: 'ACME' is not allowed"),
        ({"name": ""}, "accounts[1].name: '' is not allowed"),
        ({"name": "tenants/acme"}, "accounts[1].name: 'tenants/acme' is not a name like"),
        ({"name": "keys/0123456789abcde"}, "accounts[1].name: '0123456789abcde' is not the id of an API key"),
        ({"day_tokens": -1}, "accounts[1].day_tokens: -1; 0 to"),
        ({"month": 2**53}, "accounts[1].month: 9007199254740992; 0 to 9007199254740991"),
    ],
)
async def test_a_bad_account_is_refused_by_its_field_and_nothing_is_saved(
    accounts: Any, fields: dict[str, Any], message: str
) -> None:
    good = pb.Account(name="acme", month=2**53 - 1)
    bad = pb.Account(**{"name": "acme", **fields})
    request = pb.SaveAccountsRequest(accounts=[good, bad])
    assert (await refused(accounts.SaveAccounts(request))).startswith(message)
    assert not (await accounts.ListAccounts(pb.ListAccountsRequest())).accounts


async def test_too_many_accounts_and_bad_pages_are_refused(accounts: Any) -> None:
    many = pb.SaveAccountsRequest(accounts=[pb.Account(name="acme")] * 1001)
    assert await refused(accounts.SaveAccounts(many)) == "accounts: 1001; at most 1000"
    assert (await refused(accounts.ListAccounts(pb.ListAccountsRequest(page_size=-1)))).startswith("page_size: ")
    assert (await refused(accounts.ListAccounts(pb.ListAccountsRequest(page_token="?")))).startswith("page_token: ")


async def test_a_purge_of_a_tenant_leaves_its_account(accounts: Any, store: Store) -> None:
    account = pb.Account(name="acme", month_tokens=5, month=2**53 - 1)
    await accounts.SaveAccounts(pb.SaveAccountsRequest(accounts=[account]))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        tenants: Any = tenants_pb2_grpc.TenantServiceStub(channel)
        purged = await tenants.PurgeTenant(tenants_pb2.PurgeTenantRequest(tenant="acme"))
    assert not purged.left
    assert list((await accounts.ListAccounts(pb.ListAccountsRequest())).accounts) == [account]
