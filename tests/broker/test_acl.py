"""The users of Redis have what their processes need, and no more: on a real server, by what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from loraplex.contracts.broker import acl, functions
from loraplex.contracts.broker.cells import DrainedCells
from loraplex.contracts.broker.commands import DRAIN
from loraplex.contracts.broker.connection import connect
from loraplex.contracts.broker.functions import LIBRARY, FunctionsMissingError
from loraplex.contracts.broker.keys import (
    LEDGER,
    RESUME_KEYS,
    Keys,
    merge_resume_keys,
    rotate_resume_keys,
    withdraw_resume_keys,
)
from loraplex.contracts.broker.ledger import Ledger, Reservation
from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import AdapterRef, AdapterRequest, Capacity
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import UsageReport
from tests.broker.clocked_queue import BASE, KEYS, make_job
from tests.broker.role_clients import PASSWORD, refused, role_clients, run
from tests.broker.test_dead import dead_job
from tests.broker.test_liveness import worker

ROOMY = Capacity(rows=8, rows_limit=8, tokens=10_000, max_tokens=4096, max_rank=64)
PINNED = AdapterRequest(AdapterRef("r", "sha256:1", 8, 1), "acme")
# Commands that run a caller's code, change the server, read all keys, or make the caller another user.
STRONG = re.compile(r"eval|script|function\||acl\||config|debug|flush|^keys$|^scan$|monitor|module|migrate|subscribe|@")


def test_the_roles_have_the_commands_of_the_functions_and_none_runs_code_of_its_own() -> None:
    called = re.findall(r"redis\.p?call\('([A-Z]+)'", LIBRARY.text)
    assert len(called) == len(re.findall(r"redis\.p?call\(", LIBRARY.text))
    router, worker = (set(acl.commands_of(acl.ROLES[user])) for user in ("router", "worker"))
    assert {command.lower() for command in called} <= router | worker
    assert (set(filter(STRONG.search, router)), set(filter(STRONG.search, worker))) == ({"function|load"}, set())


async def test_a_router_and_a_worker_do_all_their_work(redis: Redis, valkey_url: str) -> None:
    await redis.function_flush()
    async with role_clients(redis, valkey_url) as (of_router, of_worker):
        queue, liveness = JobQueue(of_router, KEYS), Liveness(of_router, KEYS)
        await queue.pins.pin(PINNED)
        for job_id in ("a", "b"):
            await queue.enqueue(make_job(job_id, "acme"))
        await queue.look_up([("a", 1)])
        working, living = JobQueue(of_worker, KEYS, worker_id="w"), Liveness(of_worker, KEYS)
        assert await living.beat(worker("w")) == ["here"]
        assert [state.worker_id for state in await living.other_workers("another")] == ["w"]
        assert await working.pins.list() == [PINNED]
        claimed = await working.claim(BASE, ROOMY, [UsageReport("none", 1, 1)], wait_s=1.0)
        assert len(claimed.jobs) == 2
        await working.charge([UsageReport("a", 1, 4, ended=True)])
        await working.stop_waiting()
        await working.stop_claiming()
        await queue.finish("a", 1)
        assert [state.worker_id for state in (await liveness.take_census("here")).workers] == ["w"]
        await queue.commands.send("w-inc", DRAIN)
        assert await working.commands.next("w-inc", 5) == DRAIN
        await living.declare_dead("w-inc")
        await queue.dead.push(dead_job(1))
        await queue.dead.list()
        await queue.record_death("acme", "", "a")
        await queue.pins.unpin(PINNED.adapter)
        assert await queue.count_waiting() == 0
        assert set(await queue.quarantined()) == {("acme", "")}
        assert await queue.lift_quarantine("acme")
        await merge_resume_keys(of_router, "made", [])
        assert await rotate_resume_keys(of_router, "new") == 2
        assert await withdraw_resume_keys(of_router) == 1
        assert await merge_resume_keys(of_router, "other", ["new"]) == ["new"]
        await use_ledger(of_router)
        cells = DrainedCells(of_router)
        assert await cells.drain("main", ["second"])
        assert await cells.read() == {"main"}
        await cells.open("main")


async def use_ledger(redis: Redis) -> None:
    ledger, usage = Ledger(redis), LEDGER + "usage"
    await ledger.fill([], closes=False)
    limits = {"acme": {"concurrent_streams": 1}}
    reservation = await ledger.reserve(Reservation("r", "acme", 4, 8, "{}"), None, limits)
    reservation.use(4, 1)
    await ledger.tell([reservation], renews=True)
    reservation.open = False
    await ledger.tell([reservation])
    await ledger.fill([], closes=False)
    await ledger.load(list(ledger.unsaved.values()))
    await redis.xgroup_create(usage, "files", "0", mkstream=True)
    found: Any = await redis.xreadgroup("files", "routers", {usage: ">"})
    ((_, ((entry, _), *_)),) = found
    await redis.xautoclaim(usage, "files", "routers", 0)
    await redis.xclaim(usage, "files", "routers", 0, ["0-1"], justid=True)
    await redis.xlen(usage)
    await redis.xack(usage, "files", entry)
    await redis.xdel(usage, entry)


async def test_a_worker_waits_until_a_router_has_loaded_the_functions(redis: Redis, valkey_url: str) -> None:
    async with role_clients(redis, valkey_url) as (of_router, of_worker):
        await redis.function_flush()
        living = Liveness(of_worker, KEYS)
        for _ in range(2):
            with pytest.raises(FunctionsMissingError, match="a router of this version does"):
                await living.beat(worker("w"))
        assert await refused(redis) == {("worker", "function|load")}
        await redis.execute_command("ACL LOG", "RESET")  # type: ignore[no-untyped-call]  # theirs
        await Liveness(of_router, KEYS).take_census("here")
        assert await living.beat(worker("w")) == ["here"]


async def test_a_router_loads_the_functions_once_its_user_may(
    redis: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with role_clients(redis, valkey_url) as (of_router, _):
        await redis.function_flush()
        await run(redis, "ACL", "SETUSER", "router", "-function|load")
        liveness = Liveness(of_router, KEYS)
        for _ in range(2):
            with pytest.raises(FunctionsMissingError, match="this user may not load them"):
                await liveness.take_census("here")
        assert [int(entry["count"]) for entry in await run(redis, "ACL", "LOG")] == [1]
        await run(redis, "ACL", "SETUSER", "router", "+function|load")
        monkeypatch.setattr(functions, "REFUSED_S", 0.0)
        await liveness.take_census("here")
        await run(redis, "ACL", "LOG", "RESET")


async def test_what_a_worker_may_not(redis: Redis, valkey_url: str) -> None:
    other = Keys("other", "main")
    async with role_clients(redis, valkey_url):
        url = valkey_url.replace("unix://", f"unix://worker:{PASSWORD}@")
        attempts: list[tuple[Any, ...]] = [
            ("LRANGE", RESUME_KEYS, 0, -1),
            ("GET", LEDGER + "account:acme"),
            ("XRANGE", LEDGER + "usage", "-", "+"),
            ("HGETALL", other.prefix + "job:1"),
            ("ZADD", other.waiting, 1, "1"),
            ("SET", other.prefix + "worker:w-inc", "x"),
            ("HSET", other.workers, "w-inc", "w"),
            ("HSET", KEYS.pins, "sha256:1", "x"),
            ("ZADD", KEYS.prefix + "routers", 1, "elsewhere"),
            ("ZADD", KEYS.prefix + "quarantine", 1, "acme"),
            ("LRANGE", KEYS.dead, 0, -1),
            ("SET", "anything", "x"),
            ("EVAL", "return 1", 0),
            ("SCRIPT", "LOAD", "return 1"),
            ("FUNCTION", "LOAD", "REPLACE", LIBRARY.text),
            ("KEYS", "*"),
            ("CONFIG", "SET", "maxmemory", "1"),
            ("ACL", "SETUSER", "worker", "+@all"),
            ("PUBLISH", "channel", "x"),
            ("FLUSHALL",),
        ]
        async with await connect(url) as client:
            for attempt in attempts:
                with pytest.raises(NoPermissionError):
                    await client.execute_command(*attempt)  # type: ignore[no-untyped-call]  # theirs
        await redis.execute_command("ACL LOG", "RESET")  # type: ignore[no-untyped-call]  # theirs
