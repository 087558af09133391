"""A Redis whose memory is full refuses new jobs, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker import queue as queue_module
from loraplex.contracts.broker.commands import COMMANDS_LIMIT, DRAIN, Command, Verb
from loraplex.contracts.broker.functions import FunctionsMissingError
from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import AdapterRef, AdapterRequest
from loraplex.contracts.broker.queue import JobQueue, QueueFullError
from loraplex.contracts.broker.terms import WAKE_LIMIT, Placement, QueueState, UsageReport
from tests.broker.queued_jobs import KEYS, ROOMY, claim, job
from tests.broker.test_dead import dead_job
from tests.broker.test_liveness import worker

BEGUN = Placement(begun=True)


@pytest.fixture
async def full(redis: Redis) -> AsyncIterator[JobQueue]:
    """A queue with three jobs, on a server that is out of memory."""
    queue = JobQueue(redis, KEYS, worker_id="w")
    for name in ("a", "b", "c"):
        await queue.enqueue(job(name))
    await redis.config_set("maxmemory", "1")
    yield queue
    await redis.config_set("maxmemory", "0")


async def test_new_jobs_are_refused_and_those_that_wait_end(redis: Redis, full: JobQueue) -> None:
    with pytest.raises(QueueFullError, match="out of memory"):
        await full.enqueue(job("new"))
    assert await full.look_up([("a", 1), ("new", 1)]) == [QueueState.WAITS, QueueState.ABSENT]
    assert await claim(full, rows=2) == ["a", "b"]
    await full.charge([UsageReport("a", 1, 4), UsageReport("b", 1, 0, ended=True, ran=False)])
    await full.enqueue(job("b", attempt=2), BEGUN)  # its worker has given it back
    assert (await full.claim("sha256:0", ROOMY, [UsageReport("a", 1, 5, ended=True)])).jobs[0] == job("b", attempt=2)
    for name in ("a", "b", "c"):
        await full.finish(name, 2)
    assert await full.count_waiting() == 0


async def test_a_version_whose_functions_a_full_server_lacks_says_so(redis: Redis, full: JobQueue) -> None:
    await redis.function_flush()
    for call in (full.enqueue(job("new")), full.enqueue(job("a", attempt=2)), claim(full)):
        with pytest.raises(FunctionsMissingError, match="it has no memory for them; raise its maxmemory"):
            await call
    await redis.config_set("maxmemory", "0")
    assert await claim(full) == ["a", "b", "c"]


async def test_jobs_that_have_begun_take_a_bounded_part_of_a_full_memory(
    full: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "BEGUN_BYTES_WHEN_FULL", 6_000)
    long = job("", prompt_ids=tuple(range(300)), attempt=2)
    for name in ("one", "two", "three"):
        await full.enqueue(replace(long, job_id=name), BEGUN)
    with pytest.raises(QueueFullError, match="6000 bytes of jobs that have begun"):
        await full.enqueue(replace(long, job_id="four", prompt_ids=tuple(range(6_000))), BEGUN)
    assert await full.look_up([("three", 2), ("four", 2)]) == [QueueState.WAITS, QueueState.ABSENT]
    assert sorted(await claim(full)) == ["a", "b", "c", "one", "three", "two"]
    await full.enqueue(replace(long, job_id="last"), BEGUN)
    with pytest.raises(QueueFullError, match="out of memory"):  # its router tries again
        await full.enqueue(replace(long, job_id="not begun"))


async def test_workers_and_routers_see_each_other(redis: Redis, full: JobQueue) -> None:
    liveness = Liveness(redis, KEYS)
    await liveness.beat(worker("w"))
    assert [state.worker_id for state in (await liveness.take_census("router")).workers] == ["w"]
    await liveness.declare_dead("w-inc")
    await full.stop_claiming()
    assert (await liveness.take_census("router")).workers == []


async def test_a_worker_gets_its_commands_and_leaves_its_wait(redis: Redis, full: JobQueue) -> None:
    for _ in range(3 * WAKE_LIMIT):
        await full.stop_waiting()
    assert await redis.llen(KEYS.wake_of("w")) <= WAKE_LIMIT
    assert await full.wait_for_work(timeout_s=30)
    warm = Command(Verb.WARM, AdapterRequest(AdapterRef("r", "sha256:1", 8, 1), "acme"))
    for _ in range(COMMANDS_LIMIT):
        await full.commands.send("inc", warm)
    await full.commands.send("inc", DRAIN)
    assert await redis.llen(KEYS.commands("inc")) == COMMANDS_LIMIT
    told = [await full.commands.next("inc", 1.0) for _ in range(COMMANDS_LIMIT)]
    assert (told[0], told[-1]) == (warm, DRAIN)


async def test_dead_letters_are_kept(full: JobQueue) -> None:
    await full.dead.push(dead_job(1))
    assert await full.dead.list() == [dead_job(1)]
