"""Enqueue, claim, finish and wake-up on a real server."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
from msgspec import DecodeError
from redis.asyncio import Redis

from loraplex.contracts.broker import claims
from loraplex.contracts.broker.messages import (
    MAX_ANSWERS,
    AdapterRef,
    AdapterRequest,
    WeightedRef,
    decode_job,
    encode_record,
)
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import QueueState, UsageReport, work_of
from loraplex.contracts.options import Encode, Pooling, SamplingParams, StoppingParams, Task
from tests.broker.queued_jobs import KEYS, ROOMY, claim, job


@pytest.fixture
def queue(redis: Redis) -> JobQueue:
    return JobQueue(redis, KEYS)


async def left_behind(redis: Redis) -> set[str]:
    kept = {
        KEYS.prefix + name
        for name in ("arrivals", "arrived_work", "claimed_work", "demand", "news", "wake", "floor", "idle", "routers")
    }
    return {key.decode() for key in await redis.keys("*") if isinstance(key, bytes)} - kept


def test_a_job_survives_its_bytes() -> None:
    full = job(
        "acme/1",
        request_id="1",
        attempt=3,
        adapter=AdapterRef("tenants/acme/adapters/a/revisions/sha256:1", "sha256:1", 16, 1 << 40),
        emitted={0: (5, 6)},
        sampling=SamplingParams(
            temperature=0.5,
            top_k=4,
            top_p=0.25,
            min_p=0.125,
            typical_p=0.75,
            repetition_penalty=1.5,
            frequency_penalty=-0.5,
            presence_penalty=2.0,
            logit_bias=((3, -1.5), (7, 100.0)),
            seed=2**64 - 1,
        ),
        stopping=StoppingParams(9, min_tokens=2, stop_token_ids=(4, 5), ignore_eos=True, end_ids=(6,)),
        priority=-3,
        deadline_ms=1500,
        strikes=1,
        n=3,
        done=(1,),
        logprobs=0,
        prompt_logprobs=5,
    )
    assert decode_job(encode_record(full)) == full


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_job_with_a_weight_that_no_worker_can_divide_by_is_not_read(weight: float) -> None:
    with pytest.raises(DecodeError, match="weight: "):
        decode_job(encode_record(job("j", weight=weight)))


def test_a_job_of_more_answers_than_any_router_admits_is_not_read() -> None:
    assert decode_job(encode_record(job("j", n=MAX_ANSWERS))).n == MAX_ANSWERS
    with pytest.raises(DecodeError, match="n: 4294967295 answers"):
        decode_job(encode_record(job("j", n=2**32 - 1)))


def test_a_job_with_a_weighted_set_survives_its_bytes() -> None:
    parts = tuple(
        WeightedRef(
            AdapterRef(f"tenants/acme/adapters/{name}/revisions/sha256:{name}", f"sha256:{name}", 8, 100), weight
        )
        for name, weight in (("a", 0.5), ("b", -1.25))
    )
    weighted = job("acme/1", adapter=AdapterRef("sha256:ab", "sha256:ab", 16, 200, parts))
    assert decode_job(encode_record(weighted)) == weighted
    assert weighted.rank == 16


@pytest.mark.parametrize("task", get_args(Task))
@pytest.mark.parametrize("pooling", get_args(Pooling))
def test_a_job_that_asks_for_a_vector_survives_its_bytes(task: Task, pooling: Pooling) -> None:
    asking = job("acme/1", stopping=StoppingParams(max_tokens=0), encode=Encode(task, pooling, pair_tokens=3))
    assert decode_job(encode_record(asking)) == asking


def test_a_task_of_a_newer_version_is_left_to_workers_of_that_version() -> None:
    newer = job("j", encode=Encode("translate"))  # type: ignore[arg-type]  # of a newer version
    with pytest.raises(DecodeError, match="'translate'"):
        decode_job(encode_record(newer))


async def test_claims_come_in_the_order_of_arrival(queue: JobQueue) -> None:
    for name in ("a", "b", "c"):
        await queue.enqueue(job(name))
    assert await claim(queue, rows=2) == ["a", "b"]
    assert await claim(queue) == ["c"]
    assert await claim(queue) == []


async def test_a_full_worker_s_claim_tells_which_adapters_wait_most(queue: JobQueue) -> None:
    refs = {
        name: AdapterRef(f"tenants/acme/adapters/{name}/revisions/sha256:{name}", f"sha256:{name}", 8, 100)
        for name in "abcdef"
    }
    for number, name in enumerate("abcbccdefff"):
        await queue.enqueue(job(f"{number}", adapter=refs[name]))
    await queue.enqueue(job("plain"))
    await queue.enqueue(job("large", adapter=replace(refs["a"], rank=ROOMY.max_rank + 1)))
    await queue.enqueue(job("other", adapter=refs["a"], base_digest="sha256:1"))
    claimed = await queue.claim("sha256:0", replace(ROOMY, rows=1))
    assert ([one.job_id for one in claimed.jobs], claimed.adapter_requests) == (["0"], [])
    claimed = await queue.claim("sha256:0", replace(ROOMY, rows=0))  # a full worker looks ahead
    assert claimed.adapter_requests == [AdapterRequest(refs[name], "acme") for name in "cfbd"]
    full = await queue.claim("sha256:0", replace(ROOMY, rows=0))
    assert (full.jobs, full.waiting, full.adapter_requests) == ([], 13, claimed.adapter_requests)
    rest = await queue.claim("sha256:0", replace(ROOMY, rows=20, rows_limit=20))
    assert (len(rest.jobs), rest.waiting, rest.adapter_requests) == (11, 2, [])


async def test_a_redispatched_job_goes_first_and_replaces_its_older_attempt(queue: JobQueue) -> None:
    for name in ("a", "b"):
        await queue.enqueue(job(name))
    await queue.enqueue(job("b", attempt=2, emitted={0: (9,)}))
    claimed = (await queue.claim("sha256:0", ROOMY)).jobs
    assert [(c.job_id, c.attempt, c.emitted) for c in claimed] == [("b", 2, {0: (9,)}), ("a", 1, {})]


async def test_an_older_attempt_never_replaces_a_newer_one(queue: JobQueue) -> None:
    await queue.enqueue(job("a", attempt=2))
    await queue.enqueue(job("a", attempt=1))
    assert [c.attempt for c in (await queue.claim("sha256:0", ROOMY)).jobs] == [2]


async def test_what_does_not_fit_is_passed_over_and_stays(queue: JobQueue) -> None:
    wide = AdapterRef("r", "sha256:1", 128, 1)
    await queue.enqueue(job("long", stopping=StoppingParams(max_tokens=100)))
    await queue.enqueue(job("wide", adapter=wide))
    await queue.enqueue(job("other", base_digest="sha256:1"))
    await queue.enqueue(job("small"))
    await queue.enqueue(job("crowded", prompt_ids=tuple(range(50))))
    await queue.enqueue(job("smaller", prompt_ids=(1,)))
    assert await claim(queue, max_tokens=60, tokens=20) == ["small", "smaller"]
    assert await claim(queue, max_rank=128) == ["long", "wide", "crowded"]


async def test_a_body_that_can_not_be_read_costs_nobody_else(redis: Redis, queue: JobQueue) -> None:
    for name in ("a", "broken", "c"):
        await queue.enqueue(job(name))
    await redis.hset(KEYS.job("broken"), "body", b"\xff")
    assert await claim(queue) == ["a", "c"]


async def test_a_claim_that_empties_the_queue_leaves_no_stale_wake_up(redis: Redis, queue: JobQueue) -> None:
    for name in ("a", "b"):
        await queue.enqueue(job(name))
    claimed = await queue.claim("sha256:0", replace(ROOMY, rows=1))
    assert (len(claimed.jobs), claimed.waiting) == (1, 1)
    assert await redis.llen(KEYS.wake) > 0
    claimed = await queue.claim("sha256:0", ROOMY)
    assert (len(claimed.jobs), claimed.waiting) == (1, 0)
    assert await redis.llen(KEYS.wake) == 0


async def test_a_job_takes_a_row_for_each_choice(queue: JobQueue) -> None:
    await queue.enqueue(job("six", n=7, done=(0,)))
    await queue.enqueue(job("three", n=3))
    await queue.enqueue(job("two", n=2))
    assert await claim(queue, rows=8) == ["six", "two"]
    await queue.enqueue(job("many", n=16))
    assert await claim(queue, rows=7) == ["three"]
    assert await claim(queue, rows=8) == ["many"]


async def test_finish_is_idempotent_and_leaves_nothing(redis: Redis, queue: JobQueue) -> None:
    await queue.enqueue(job("waits"))
    await queue.finish("waits", 1)
    await queue.finish("waits", 1)
    await queue.enqueue(job("runs"))
    assert await claim(queue) == ["runs"]
    await queue.charge([UsageReport("runs", 1, 4, ended=True)])
    await queue.charge([UsageReport("runs", 1, 4, ended=True)])
    await queue.finish("runs", 1)
    assert await left_behind(redis) == set()


async def test_finishing_an_older_attempt_leaves_the_newer_one(queue: JobQueue) -> None:
    await queue.enqueue(job("a", attempt=2))
    await queue.finish("a", 1)
    assert await claim(queue) == ["a"]


async def test_what_lost_its_keys_is_dropped(redis: Redis, queue: JobQueue) -> None:
    for name in ("a", "b", "again"):
        await queue.enqueue(job(name, attempt=2 if name == "again" else 1))
        await redis.delete(KEYS.job(name))
    await queue.enqueue(job("c", tenant="beta"))
    await redis.delete(KEYS.prefix + "queue:beta", KEYS.prefix + "totals")
    assert await claim(queue) == ["c"]  # as one of the last arrivals
    assert await left_behind(redis) <= {KEYS.prefix + "charged"}
    await queue.finish("c", 1)
    await queue.enqueue(job("c", tenant="beta", attempt=2))
    assert await claim(queue) == ["c"]


async def test_waiting_tells_who_still_waits(queue: JobQueue) -> None:
    await queue.enqueue(job("a"))
    await queue.enqueue(job("b"))
    await claim(queue, rows=1)
    looked_up = await queue.look_up([("a", 1), ("b", 1), ("b", 2), ("c", 1)])
    assert looked_up == [QueueState.ABSENT, QueueState.WAITS, QueueState.ABSENT, QueueState.ABSENT]
    await queue.enqueue(job("b", attempt=2))
    assert await queue.look_up([("b", 1), ("b", 2)]) == [QueueState.WAITS, QueueState.WAITS]
    assert await queue.count_waiting() == 1


async def test_an_enqueue_wakes_an_idle_worker(queue: JobQueue) -> None:
    idle = asyncio.create_task(queue.wait_for_work(timeout_s=30))
    await queue.enqueue(job("a"))
    assert await idle


async def test_a_claim_that_leaves_work_wakes_the_next_worker(redis: Redis, queue: JobQueue) -> None:
    for name in ("a", "b"):
        await queue.enqueue(job(name))
    await redis.delete(KEYS.wake)
    await claim(queue, rows=1)
    assert await queue.wait_for_work(timeout_s=30)


async def test_a_worker_without_a_link_to_the_job_s_router_wakes_the_next_one(redis: Redis, queue: JobQueue) -> None:
    await queue.enqueue(job("a"))
    await redis.delete(KEYS.wake)  # as the worker takes it that was woken
    assert await claim(queue, routers=()) == []
    assert await queue.wait_for_work(timeout_s=30)
    assert await claim(queue, routers=("127.0.0.1:1",)) == ["a"]


async def test_a_server_that_lost_its_functions_gets_them_again(redis: Redis, queue: JobQueue) -> None:
    await queue.enqueue(job("a"))
    await redis.function_flush()
    assert await claim(queue) == ["a"]


async def test_a_claim_that_waits_takes_the_job_that_wakes_it(redis: Redis, queue: JobQueue) -> None:
    waiting = asyncio.create_task(queue.claim("sha256:0", ROOMY, wait_s=30))
    await queue.enqueue(job("a"))
    assert [taken.job_id for taken in (await waiting).jobs] == ["a"]
    # A server that has lost its functions meanwhile, and one on which nobody enqueues.
    waiting = asyncio.create_task(queue.claim("sha256:0", ROOMY, wait_s=30))
    await redis.function_flush()
    await queue.enqueue(job("b"))
    assert [taken.job_id for taken in (await waiting).jobs] == ["b"]
    assert (await queue.claim("sha256:0", ROOMY, wait_s=0.01)).jobs == []


async def test_a_worker_that_is_told_to_stop_does_not_wait_on(queue: JobQueue) -> None:
    waiting = asyncio.create_task(queue.claim("sha256:0", ROOMY, wait_s=30))
    await queue.stop_waiting()
    assert (await waiting).jobs == []


async def test_a_long_job_is_written_and_read_in_threads(
    queue: JobQueue, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading and writing its ids would hold the loops of its router and its worker."""
    threads = list[int]()

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return work(*arguments)

        return call

    monkeypatch.setattr(queue, "make_entry", noted(queue.make_entry))
    monkeypatch.setattr(claims, "decode_job", noted(decode_job))
    short, long = job("short"), job("long", emitted={0: tuple(range(100_000)), 2: (5,)}, n=3, resumed=True)
    for each in (short, long):
        await queue.enqueue(each)
        assert (await queue.claim("sha256:0", replace(ROOMY, tokens=200_000))).jobs == [each]
    assert [ident == threading.get_ident() for ident in threads] == [True, True, False, False]


async def test_the_queue_reckons_with_a_bounded_answer(queue: JobQueue) -> None:
    endless = job("a", stopping=StoppingParams(max_tokens=30_000))
    await queue.enqueue(endless)
    assert (await queue.load()).waiting_work == work_of(endless) == 3 + 2 * 2_048
