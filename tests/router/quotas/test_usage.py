"""Usage events on Redis and a disk: the counts are the account's, none is lost or there twice, whoever dies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from broker import ledger_terms as terms
from broker.ledger import Ledger
from broker.ledger_records import AccountCopy, Charge
from broker.scripts import Scripts
from router.metrics import RouterMetrics
from router.quotas import usage
from router.quotas.grant import End
from router.quotas.plans import Plans
from router.quotas.quotas import Quotas
from router.quotas.usage import Facts, UsageLog, event_of
from tests.router.quotas.test_quotas import begun, granted
from tests.router.recording_link import job

# Reservations that nobody renews end at once, and any router reports a charge at once.
AT_ONCE = Scripts(constants={"HELD_MS": 0, "REPORT_AFTER_MS": 0, "RECOVERY_MS": 0})
New = Callable[..., tuple[Quotas, UsageLog]]


@pytest.fixture
def new(redis: Redis, tmp_path: Path) -> New:
    """Make the quotas of a router with a usage file of its own."""

    def make(name: str) -> tuple[Quotas, UsageLog]:
        ledger = Ledger(redis, AT_ONCE, reports=True)
        usage = UsageLog(tmp_path / name, ledger.acknowledge, RouterMetrics())
        return Quotas(ledger, Plans(), usage=usage, retry_s=0.01), usage

    return make


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for name in sorted(path.glob("router*")) for line in name.read_text().splitlines()]


async def test_an_event_has_what_its_tenant_was_charged(new: New, tmp_path: Path, redis: Redis) -> None:
    quotas, _ = new("router-a")
    begun(grant := await granted(quotas, 2, 100), 60)
    grant.settle(End.FINISHED)
    (await granted(quotas, 2, 100)).settle(End.ENDED)  # nothing of it was used
    await quotas.drain(5.0)
    (event,) = events(tmp_path)
    assert {"specversion": "1.0", "type": "loraplex.usage.v1", "subject": "tenants/acme"}.items() <= event.items()
    assert event["id"] == f"{grant.id}:0"
    data = event["data"]
    assert (data["input_tokens"], data["output_tokens"], data["cached_tokens"]) == (2, 60, 0)
    assert (data["tenant"], data["model"], data["request_id"], data["key"]) == ("acme", "tiny", "j", "")
    assert (await Ledger(redis).look("acme", AccountCopy())).account.day_tokens == 62
    assert (tmp_path / "router-a").stat().st_mode & 0o777 == 0o600


async def test_a_purged_tenant_is_listed_again_with_its_next_call_alone(new: New, redis: Redis) -> None:
    (quotas, _), ledger = new("router-a"), Ledger(redis)
    begun(grant := await granted(quotas, 2, 100), 60)
    await grant.settle(End.FINISHED)
    assert await ledger.some_tenants(9) == ["acme"]
    await quotas.forget_tenant("acme")
    assert await ledger.forget_tenant("acme") == (1, 0), "its charge is written"
    assert await quotas._accounts.reported_tenants() == []
    grant = await granted(quotas, 2, 100)
    assert await quotas._accounts.reported_tenants() == ["acme"]
    await grant.settle(End.ENDED)


async def test_the_event_of_a_call_of_several_jobs_has_the_calls_id(new: New, tmp_path: Path) -> None:
    quotas, _ = new("router-a")
    grant = await quotas.reserve("acme", 2, 0, facts=Facts(request_id="call"))
    assert grant is not None
    begun(grant, 0)
    grant.settle(End.FINISHED)
    await quotas.drain(5.0)
    assert [event["data"]["request_id"] for event in events(tmp_path)] == ["call"]


async def test_a_request_whose_client_had_all_of_it_keeps_its_facts(new: New, tmp_path: Path) -> None:
    (first, _), (second, _) = new("router-a"), new("router-b")
    begun(grant := await granted(first, 2, 100), 60)
    grant.count("acme")
    facts = Facts(cached_tokens=1).of_job(job())
    resumed = await second.reserve("acme", 2, 100, facts=facts, resumed=(grant.id, 60))
    assert resumed is not None
    resumed.settle(End.FINISHED)
    await second.drain(5.0)
    (event,) = events(tmp_path)
    expected = {"request_id": "j", "model": "tiny", "input_tokens": 2, "cached_tokens": 1, "output_tokens": 60}
    assert expected.items() <= event["data"].items()


async def test_another_router_writes_the_events_of_a_dead_one(new: New, tmp_path: Path) -> None:
    first, _ = new("router-a")
    begun(settled := await granted(first, 2, 100), 60)
    begun(running := await granted(first, 2, 100), 7)
    await first._accounts.look_at_used([])  # the last look before its death
    await settled.settle(End.FINISHED)
    second, usage = new("router-b")
    for _ in range(3):
        await second._accounts.look_at_used(await second._accounts.reported_tenants())
        await usage.write()
    charged = {event["id"]: event["data"]["output_tokens"] for event in events(tmp_path)}
    assert charged == {f"{settled.id}:0": 60, f"{running.id}:0": 7}
    assert len(events(tmp_path)) == 2


async def test_a_full_disk_and_a_torn_line_lose_nothing(new: New, tmp_path: Path) -> None:
    quotas, usage = new("router-a")
    (tmp_path / "router-a").mkdir()
    begun(grant := await granted(quotas, 2, 100), 60)
    grant.settle(End.FINISHED)
    await quotas.drain(5.0)
    (tmp_path / "router-a").rmdir()
    (tmp_path / "router-a").write_text('{"specver')
    await quotas._accounts.look_at_used([])
    await usage.write()
    await quotas._accounts.look_at_used([])
    await usage.write()
    torn, whole = (tmp_path / "router-a").read_text().splitlines()
    assert torn == '{"specver'
    assert json.loads(whole)["id"] == f"{grant.id}:0"


def test_routers_that_append_to_one_file_leave_no_empty_lines(tmp_path: Path) -> None:
    event = event_of("acme", Charge("r" * 200_000, 3, 2, 1, "{}"))

    def append(_: int) -> None:
        for _ in range(100):
            usage._append(tmp_path / "usage.jsonl", [event])

    with ThreadPoolExecutor(3) as routers:
        list(routers.map(append, range(3)))
    lines = (tmp_path / "usage.jsonl").read_text().splitlines()
    assert Counter(map(len, lines)) == {len(json.dumps(event, separators=(",", ":"))): 300}


@pytest.mark.parametrize("subject", ["?", "[]", '{"key": 1}', '{"key": "\\ud800"}', '{"x":' + "[" * 9_000])
def test_a_charge_with_facts_that_no_router_has_written_is_reported(subject: str) -> None:
    event = event_of("acme", Charge("r:0", 3, 2, 1, subject))
    assert (event["data"]["input_tokens"], event["data"]["output_tokens"], event["data"]["key"]) == (3, 2, "")


def test_any_router_reports_a_charge_after_its_own_had_the_time() -> None:
    assert terms.REPORT_AFTER_MS >= 2_000
