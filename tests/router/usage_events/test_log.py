"""Test usage events on Redis and a disk: the counts are the account's, none is lost, whoever dies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError

from loraplex.contracts.broker.functions import Library, shipped_functions
from loraplex.contracts.broker.keys import LEDGER
from loraplex.contracts.broker.ledger import Ledger
from loraplex.router.metrics import RouterMetrics
from loraplex.router.quotas.plans import Plans
from loraplex.router.quotas.quotas import Facts, Quotas
from loraplex.usage_events.log import UsageLog, _append, event_of
from tests.router.quotas.test_quotas import begun, reserved
from tests.router.recording_link import job

# Reservations that nobody renews end at once.
AT_ONCE = Library(shipped_functions(HELD_MS=0, RECOVERY_MS=0))
New = Callable[..., tuple[Quotas, UsageLog]]


@pytest.fixture
def new(redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> New:
    """Make the quotas of a router with a usage file of its own; events that wait are claimed at once."""
    monkeypatch.setattr("loraplex.usage_events.log.CLAIM_MS", 0)
    monkeypatch.setattr("loraplex.usage_events.log.CLAIM_S", 0.0)

    def make(name: str) -> tuple[Quotas, UsageLog]:
        events = UsageLog(redis, tmp_path / name, RouterMetrics())
        return Quotas(Ledger(redis, AT_ONCE), Plans(), usage=events), events

    return make


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for name in sorted(path.glob("router*")) for line in name.read_text().splitlines()]


async def test_an_event_has_what_its_tenant_was_charged(new: New, tmp_path: Path, redis: Redis) -> None:
    quotas, _ = new("router-a")
    begun(budget := await reserved(quotas, 2, 100), 60)
    budget.settle()
    (await reserved(quotas, 2, 100)).settle()  # nothing of it was used
    await quotas.drain(5.0)
    (event,) = events(tmp_path)
    assert {"specversion": "1.0", "type": "loraplex.usage.v1", "subject": "tenants/acme"}.items() <= event.items()
    assert event["id"] == f"{budget.reservation.id}:0"
    expected = {"tenant": "acme", "request_id": "j", "model": "tiny", "input_tokens": 2, "output_tokens": 60}
    assert expected.items() <= event["data"].items()
    assert await redis.xlen(LEDGER + "usage") == 0


async def test_the_event_of_a_call_of_several_jobs_has_the_calls_id(new: New, tmp_path: Path) -> None:
    quotas, _ = new("router-a")
    budget = await quotas.reserve("acme", 2, 0, facts=Facts(request_id="call"))
    assert budget is not None
    begun(budget, 0)
    budget.settle()
    await quotas.drain(5.0)
    assert [event["data"]["request_id"] for event in events(tmp_path)] == ["call"]


async def test_a_request_whose_client_had_all_of_it_keeps_its_facts(new: New, tmp_path: Path) -> None:
    (first, _), (second, _) = new("router-a"), new("router-b")
    begun(budget := await reserved(first, 2, 100), 60)
    facts = Facts(cached_tokens=1).of_job(job())
    resumed = await second.reserve("acme", 2, 100, facts=facts, resumed=(budget.reservation.id, 60))
    assert resumed is not None
    resumed.settle()
    await second.drain(5.0)
    (event,) = events(tmp_path)
    expected = {"request_id": "j", "model": "tiny", "input_tokens": 2, "cached_tokens": 1, "output_tokens": 60}
    assert expected.items() <= event["data"].items()


async def test_another_router_writes_the_events_of_a_dead_one(new: New, tmp_path: Path, redis: Redis) -> None:
    first, read = new("router-a")
    begun(settled := await reserved(first, 2, 100), 60)
    begun(running := await reserved(first, 2, 100), 7)
    await first.renew()
    await settled.settle()
    assert await read._read()  # and dies before it has written
    second, log = new("router-b")
    await reserved(second, 2, 100)
    await second.renew()
    await log.write()
    charged = {event["id"]: event["data"]["output_tokens"] for event in events(tmp_path)}
    assert charged == {f"{settled.reservation.id}:0": 60, f"{running.reservation.id}:0": 7}
    assert await redis.xlen(LEDGER + "usage") == 0


async def test_a_router_that_dies_before_it_has_told_all_of_a_write_leaves_nothing_in_the_stream(
    new: New, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    (quotas, log), (_, other) = new("router-a"), new("router-b")
    begun(budget := await reserved(quotas, 2, 100), 60)
    await budget.settle()
    commands = list[str]()

    def dies_after_the_first(name: str) -> Callable[..., object]:
        command = getattr(redis, name)

        def call(*arguments: Any) -> object:
            commands.append(name)
            if len(commands) == 2:
                raise RedisConnectionError("the process has ended")
            return command(*arguments)

        return call

    for name in ("xack", "xdel"):
        monkeypatch.setattr(redis, name, dies_after_the_first(name))
    assert not await log.write()
    assert await other.write()
    assert await redis.xlen(LEDGER + "usage") == 0


async def test_events_wait_while_a_full_redis_takes_no_group(
    new: New, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas, log = new("router-a")
    begun(budget := await reserved(quotas, 2, 100), 60)
    await budget.settle()

    async def refuse(*_: object, **__: object) -> None:
        raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")

    with monkeypatch.context() as full:
        full.setattr(redis, "xgroup_create", refuse)
        assert not await log.write()
    assert await log.write()


@pytest.mark.parametrize("kept_s", [10.0, 0.0], ids=["at once", "after the router stood still"])
async def test_a_redis_that_lost_its_data_gets_the_last_events_again(
    new: New, tmp_path: Path, redis: Redis, monkeypatch: pytest.MonkeyPatch, kept_s: float
) -> None:
    monkeypatch.setattr("loraplex.contracts.broker.ledger._RECENT_S", kept_s)
    quotas, log = new("router-a")
    begun(settled := await reserved(quotas, 2, 100), 60)
    await settled.settle()
    await redis.flushdb()
    await quotas.renew()
    await log.write()
    assert [event["id"] for event in events(tmp_path)] == [f"{settled.reservation.id}:0"]


async def test_a_full_disk_and_a_torn_line_lose_nothing(new: New, tmp_path: Path) -> None:
    quotas, log = new("router-a")
    (tmp_path / "router-a").mkdir()
    begun(budget := await reserved(quotas, 2, 100), 60)
    budget.settle()
    await quotas.drain(5.0)
    (tmp_path / "router-a").rmdir()
    (tmp_path / "router-a").write_text('{"specver')
    assert await log.write()
    torn, whole = (tmp_path / "router-a").read_text().splitlines()
    assert torn == '{"specver'
    assert json.loads(whole)["id"] == f"{budget.reservation.id}:0"


async def test_a_full_disk_keeps_no_events_from_the_other_routers(new: New, tmp_path: Path, redis: Redis) -> None:
    (quotas, full), (_, other) = new("router-a"), new("router-b")
    (tmp_path / "router-a").mkdir()  # takes no line
    begun(first := await reserved(quotas, 2, 100), 60)
    await first.settle()
    assert not await full.write()
    begun(second := await reserved(quotas, 2, 100), 60)
    await second.settle()
    for _ in range(3):
        assert not await full.write()
    waiting: Any = await redis.xpending_range(LEDGER + "usage", "files", "-", "+", 9)
    assert [one["times_delivered"] for one in waiting] == [1], "a claim makes the event seem fresh to others"
    assert await other.write()
    written = [json.loads(line)["id"] for line in (tmp_path / "router-b").read_text().splitlines()]
    assert sorted(written) == sorted(f"{one.reservation.id}:0" for one in (first, second))


def test_routers_that_append_to_one_file_leave_no_empty_lines(tmp_path: Path) -> None:
    event = event_of({b"id": b"r" * 200_000, b"input": b"3", b"output": b"2"})

    def append(_: int) -> None:
        for _ in range(100):
            _append(tmp_path / "usage.jsonl", [event])

    with ThreadPoolExecutor(3) as routers:
        list(routers.map(append, range(3)))
    lines = (tmp_path / "usage.jsonl").read_text().splitlines()
    assert Counter(map(len, lines)) == {len(json.dumps(event, separators=(",", ":"))): 300}


@pytest.mark.parametrize("facts", ["?", "[]", '{"key": 1}', '{"key": "\\ud800"}', '{"x":' + "[" * 9_000, '"\xff"'])
def test_a_charge_with_facts_that_no_router_has_written_is_reported(facts: str) -> None:
    event = event_of(
        {b"id": b"r:0", b"input": b"3", b"output": b"2", b"at_ms": b"?", b"facts": facts.encode("latin-1")}
    )
    assert (event["data"]["input_tokens"], event["data"]["output_tokens"], event["data"]["key"]) == (3, 2, "")


def test_an_event_has_its_cost_to_the_nano_unit_where_there_are_prices() -> None:
    charge = {b"id": b"r:0", b"input": b"12", b"cached": b"5", b"output": b"60", b"cost": b"37425", b"at_ms": b"1"}
    data = event_of({**charge, b"facts": b'{"tenant":"acme","currency":"EUR","cached_tokens":9}'})["data"]
    assert (data["cached_tokens"], data["cost"], data["currency"]) == (5, "0.000037425", "EUR")
    assert not {"cost", "currency"} & event_of({**charge, b"facts": b'{"tenant":"acme"}'})["data"].keys()
