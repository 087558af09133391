"""Shares of a limit: room for a newcomer whatever the others take, turns of the tenants, and callers that leave."""

from __future__ import annotations

import asyncio

import pytest

from loraplex.runtime.rpc.shares import FairTurns, Shares


def take_all(shares: Shares, tenant: str) -> int:
    """Take as much as the tenant gets, one by one; return how much."""
    taken = 0
    while shares.take(tenant):
        taken += 1
    return taken


def test_greedy_tenants_leave_as_much_as_each_of_them_has() -> None:
    shares = Shares(1000)
    assert take_all(shares, "a") == 500
    assert take_all(shares, "b") == 250
    assert take_all(shares, "c") == 125
    shares.give("a", 300)  # what a gave back is shared by all three
    assert take_all(shares, "b") + take_all(shares, "c") >= 150
    shares.give("a", 200)
    assert take_all(shares, "a") > 100


def test_amounts_of_nothing_are_taken_and_given_back_in_any_number() -> None:
    shares = Shares(10)
    assert shares.take("a", 0)
    assert shares.take("a", 0)
    shares.give("a", 0)
    shares.give("a", 0)
    assert shares.take("a", 5)
    assert shares.take("a", 0)
    shares.give("a", 0)
    shares.give("a", 5)
    assert take_all(shares, "a") == 5


def test_whatever_the_number_of_tenants_the_sum_is_bounded_and_a_newcomer_finds_room() -> None:
    shares = Shares(1000)
    tenants = [f"t{number}" for number in range(300)]
    taken = dict.fromkeys(tenants, 0)
    for _ in range(1000):  # all of them take at the same rate
        for tenant in tenants:
            taken[tenant] += shares.take(tenant)
    assert min(taken.values()) >= 3
    assert sum(taken.values()) < 1000
    assert shares.take("newcomer")


def test_an_amount_must_fit_what_is_free() -> None:
    shares = Shares(10)
    assert not shares.take("a", 11)
    assert shares.take("a", 6)
    assert not shares.take("b", 5)
    assert shares.take("b", 4)
    shares.give("a", 6)
    shares.give("b", 4)
    assert shares.take("b", 10)


async def test_tenants_take_turns_and_one_tenant_s_requests_keep_their_order() -> None:
    turns = FairTurns(2)
    order: list[str] = []

    async def work(tenant: str, name: str) -> None:
        await turns.take(tenant)
        order.append(name)
        await asyncio.sleep(0)
        turns.give(tenant)

    names = [("a", f"a{number}") for number in range(4)] + [("b", "b0"), ("b", "b1")]
    await asyncio.gather(*(work(tenant, name) for tenant, name in names))
    assert [name for name in order if name[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert [name for name in order if name[0] == "b"] == ["b0", "b1"]
    assert order.index("b1") < order.index("a3")


@pytest.mark.parametrize("granted", [False, True])
async def test_a_caller_that_leaves_holds_nothing(granted: bool) -> None:
    turns = FairTurns(1)
    await turns.take("a")
    leaving, waiting = asyncio.create_task(turns.take("b")), asyncio.create_task(turns.take("c"))
    await asyncio.sleep(0)
    if granted:
        turns.give("a")  # its turn has come when it is cancelled
    leaving.cancel()
    if not granted:
        turns.give("a")
    async with asyncio.timeout(60):
        await waiting
    assert leaving.cancelled()
    turns.give("c")
    await turns.take("a")
