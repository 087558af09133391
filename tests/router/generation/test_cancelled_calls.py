"""Calls that are cancelled, or fail, between reservation and queue, on Redis with sealed jobs: nothing is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from loraplex.contracts.broker import queue
from loraplex.contracts.broker.functions import BatchedFunction, Command
from loraplex.contracts.broker.keys import LEDGER
from loraplex.contracts.broker.ledger import Ledger
from loraplex.contracts.broker.queue import (
    DeadlineUnattainableError,
    JobQueue,
    QuarantinedError,
    QueueFullError,
    RedisFullError,
)
from loraplex.contracts.broker.terms import Placement
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import DispatchTiming
from loraplex.router.generation.generation import Generation
from loraplex.router.quotas.quotas import Quotas
from loraplex.runtime.rpc.errors import CallError, Exhausted
from tests.accounts import account_of
from tests.credentials_files import router_seals
from tests.plans_file import plans_in
from tests.router.generation.test_generation import REQUEST, TOKENS, Admission, call
from tests.router.recording_link import KEYS


class Gate:
    """Stops the calls of one script until `open`: before the server has them, or behind their answer."""

    def __init__(self, script: str, *, answered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        run = BatchedFunction._run

        async def stopped(batched: BatchedFunction, calls: Sequence[Command]) -> list[Any]:
            if not any(str(call[1]).endswith(script) for call in calls):
                return await run(batched, calls)
            answers = await run(batched, calls) if answered else None
            self.reached.set()
            await self.open.wait()
            return await run(batched, calls) if answers is None else answers

        monkeypatch.setattr(BatchedFunction, "_run", stopped)


class Router:
    """Keeps a generation whose jobs are sealed, and whose tenant has a quota."""

    def __init__(self, redis: Redis, directory: Path, quota: int = 1000) -> None:
        (directory / "plans.toml").write_text(f"[tenants.acme]\ntokens_per_day = {quota}\n")
        self.queue = JobQueue(redis, KEYS, seals=router_seals(directory, time.time))
        self.dispatcher = Dispatcher(
            lambda *_: self.queue, lambda *_: Placement(), timing=DispatchTiming(enqueue_s=0.4, late_enqueue_s=0.4)
        )
        self.quotas = Quotas(Ledger(redis), plans_in(directory / "plans.toml"))
        admission: Any = Admission()
        self.generation = Generation(admission, self.dispatcher, TOKENS, self.quotas, admission)


@pytest.fixture
def router(redis: Redis, tmp_path: Path) -> Router:
    return Router(redis, tmp_path)


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 — Redis tells no event
            await asyncio.sleep(0.005)


async def nothing_is_left(router: Router, redis: Redis) -> bool:
    account = await account_of(redis, "acme")
    held = await redis.keys(LEDGER + "held:*")
    return (
        not held and not await router.queue.count_waiting() and not account["day_tokens"] + account["held_day_tokens"]
    )


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("script", ["ledger_reserve", "enqueue", "admit"])
async def test_a_call_that_is_cancelled_on_its_way_into_the_queue_leaves_nothing(
    router: Router, redis: Redis, monkeypatch: pytest.MonkeyPatch, script: str, *, answered: bool
) -> None:
    monkeypatch.setattr(queue, "ADMITTED_TOKENS", 4096 if script == "admit" else 0)
    gate = Gate(script, answered=answered, monkeypatch=monkeypatch)
    leaving = call(router.generation)
    await asyncio.wait_for(gate.reached.wait(), 60)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    # The reservation ends, and the job is removed, before a slow server carries out the call that was cancelled.
    await router.quotas.drain(5.0)
    await router.dispatcher.drain_tasks()
    gate.open.set()
    assert router.dispatcher.jobs == ()
    await asyncio.sleep(0.01)  # what was stopped is carried out
    await until(partial(nothing_is_left, router, redis))
    again = call(router.generation, REQUEST)  # and the id is free
    await until(router.queue.count_waiting)
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)


async def test_a_call_over_its_quota_is_neither_queued_nor_removed(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, removals = Router(redis, tmp_path, quota=1), Mock()
    monkeypatch.setattr(router.queue, "finish", removals)
    with pytest.raises(Exhausted) as refused:
        await call(router.generation)
    assert refused.value.reason == "QUOTA_EXCEEDED"
    assert router.dispatcher.jobs == ()
    await router.dispatcher.drain_tasks()
    assert await nothing_is_left(router, redis)
    removals.assert_not_called()


FAILURES = [
    ("admit", QueueFullError("full"), "QUEUE_FULL"),
    ("admit", RedisFullError("full"), "REDIS_FULL"),
    ("admit", QuarantinedError(5), "QUARANTINED"),
    ("admit", DeadlineUnattainableError(5), "DEADLINE_UNATTAINABLE"),
    ("admit", RedisConnectionError("away"), "QUEUE_DOWN"),
    ("admit", ValueError("odd"), None),
    ("make_entry", ValueError("no key"), None),
]


@pytest.mark.parametrize(("step", "error", "reason"), FAILURES)
async def test_a_call_whose_job_cannot_be_queued_gives_its_reservation_back(
    router: Router, redis: Redis, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception, reason: str | None
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(router.queue, step, fail)
    with pytest.raises(CallError if reason else type(error)) as raised:
        await call(router.generation)
    assert getattr(raised.value, "reason", None) == reason
    await router.quotas.drain(5.0)
    assert await nothing_is_left(router, redis)
