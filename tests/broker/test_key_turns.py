"""API keys in their tenant's queue: the share of each, and their turns by weight."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import msgspec
import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.messages import Capacity
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import (
    LOOKS_PER_CHECK,
    OUTPUT_WEIGHT,
    PROMPT_WEIGHT,
    KeyTerms,
    Placement,
    QueueLimits,
    QueueState,
)
from tests.broker.clocked_queue import BASE, KEYS, Clock, ClockedQueue, make_job

ROOMY = Capacity(rows=99, rows_limit=99, tokens=100_000, max_tokens=4096, max_rank=64)
ONE = replace(ROOMY, rows=1)
# All jobs of make_job have as much work.
WORK = 4 * PROMPT_WEIGHT + 8 * OUTPUT_WEIGHT
STATE = KEYS.prefix + "queue:a/keys"


def weighted(key: str, weight: float) -> Placement:
    """Return the placement of a call with a key."""
    return Placement(key=KeyTerms(key, weight))


HEAVY, LIGHT, NONE = weighted("heavy", 3.0), weighted("light", 1.0), Placement()
NAMES = {"h": HEAVY, "l": LIGHT, "n": NONE}


async def backlog(queue: ClockedQueue, count: int, kinds: str = "hl") -> None:
    """Let so many jobs of each key wait, those of one key after those of another."""
    for kind in kinds:
        for number in range(count):
            assert not await queue.enqueue(make_job(f"{kind}{number}", "a"), NAMES[kind])


async def claimed(queue: ClockedQueue, count: int) -> str:
    """Claim jobs one by one; return the first letters of their ids."""
    found = [(await queue.claim("w", ONE)).jobs for _ in range(count)]
    return "".join(job.job_id[0] for jobs in found for job in jobs)


async def test_keys_are_served_by_weight_and_all_other_calls_as_one_key(queue: ClockedQueue) -> None:
    await backlog(queue, 12, "lnh")
    order = await claimed(queue, 20)
    assert [order[:10].count(kind) for kind in "hln"] == [6, 2, 2]
    assert [order.count(kind) for kind in "hln"] == [12, 4, 4]
    assert await claimed(queue, 99) == "ln" * 8


async def test_the_weights_of_keys_take_nothing_from_other_tenants(queue: ClockedQueue) -> None:
    await backlog(queue, 6)
    for number in range(12):
        await queue.enqueue(make_job(f"b{number}", "b"))
    assert (await claimed(queue, 12)).count("b") == 6


async def test_each_priority_has_turns_of_its_own(queue: ClockedQueue) -> None:
    await backlog(queue, 4)
    for kind in "lh":
        for number in range(4):
            await queue.enqueue(make_job(f"{kind}{number} soon", "a", priority=5), NAMES[kind])
    assert (await claimed(queue, 8))[:4].count("h") == 3
    assert (await claimed(queue, 8))[:4].count("h") == 3


async def test_a_key_with_one_job_at_a_time_is_not_always_next(queue: ClockedQueue) -> None:
    await backlog(queue, 12, "l")
    order = ""
    for number in range(8):
        await queue.enqueue(make_job(f"s{number}", "a"), weighted("single", 1.0))
        order += await claimed(queue, 1)
        if order[-1] == "l":
            await queue.finish(f"s{number}", 1)
    assert order.count("s") == 4


async def test_jobs_that_leave_without_a_claim_give_their_turns_back(queue: ClockedQueue) -> None:
    await backlog(queue, 8, "lh")
    for number in range(8):
        await queue.finish(f"l{number}", 1)
    for number in range(4):
        await queue.enqueue(make_job(f"l{number} again", "a"), LIGHT)
    assert await claimed(queue, 8) == "hlhhhlhh"


async def test_what_waited_before_a_weight_is_first_and_turns_last_until_the_queue_is_empty(
    queue: ClockedQueue,
) -> None:
    await queue.enqueue(make_job("n soon", "a", deadline_ms=60_000))
    await backlog(queue, 2, "n")
    await backlog(queue, 4, "lh")
    await queue.enqueue(make_job("early", "a", deadline_ms=30_000))
    assert await claimed(queue, 6) == "nnnlhe"
    assert await claimed(queue, 6) == "hhlhll"
    await queue.enqueue(make_job("plain", "a"))
    await queue.enqueue(make_job("early", "a", deadline_ms=30_000))
    assert await claimed(queue, 2) == "ep"
    assert not any("queue:" in name or name == "totals" for name in await queue.names())


async def test_a_key_has_a_share_of_the_queue_within_its_tenants(redis: Redis, clock: Clock) -> None:
    queue = ClockedQueue(redis, QueueLimits(jobs=8, tenant_jobs=5))
    await queue.start()
    small = Placement(key=KeyTerms("small", queue_share=0.25))
    for number in range(2):
        assert not await queue.enqueue(make_job(f"s{number}", "a"), small)
    assert await queue.enqueue(make_job("s2", "a"), small) == "key_jobs"
    assert not await queue.enqueue(make_job("begun", "a", attempt=2), replace(small, begun=True))
    assert not await queue.enqueue(make_job("s0", "a", attempt=2), replace(small, begun=True))
    assert not await queue.enqueue(make_job("s2", "a"), small)
    assert await claimed(queue, 3) == "bss"
    assert not await queue.enqueue(make_job("s3", "a"), small)
    for number in range(3):
        assert not await queue.enqueue(make_job(f"n{number}", "a"))
    assert await queue.enqueue(make_job("s4", "a"), small) == "tenant_jobs"
    large = make_job("l", "a", prompt=500)
    small_bytes = ClockedQueue(redis, QueueLimits(bytes=(await queue.waiting())["n0"].size * 10))
    await small_bytes.start()
    assert await small_bytes.enqueue(large, small) == "key_bytes"
    assert not await small_bytes.enqueue(make_job("s", "a"), small)


async def test_what_is_left_of_a_lost_queue_refuses_nobody(redis: Redis, queue: ClockedQueue) -> None:
    await redis.hset(STATE, mapping={"jobs:heavy": 1 << 51, "finish:100:heavy": "9e13"})
    await redis.hset(KEYS.prefix + "totals", "a", msgspec.msgpack.encode([0, 0, 0, 0, 1, 1])[1:])
    await backlog(queue, 2, "nlh")
    assert await claimed(queue, 6) == "nnlhhl"
    assert not {"queue:a", "queue:a/keys", "totals"} & await queue.names()


async def test_turns_go_on_where_their_key_was_lost(redis: Redis) -> None:
    queue = JobQueue(redis, KEYS, worker_id="w")
    for number in range(8):
        await queue.enqueue(make_job(f"h{number}", "a"), HEAVY)
    for _ in range(6):
        await queue.claim(BASE, ONE)
    await redis.delete(STATE)
    for number in range(3):
        await queue.enqueue(make_job(f"n{number}", "a"))
    jobs = [(await queue.claim(BASE, ONE)).jobs[0].job_id for _ in range(5)]
    assert jobs == ["h6", "n0", "h7", "n1", "n2"]
    assert await redis.exists(STATE, KEYS.prefix + "queue:a") == 0


async def test_counts_are_right_where_the_queue_was_lost(redis: Redis, clock: Clock) -> None:
    queue = ClockedQueue(redis, QueueLimits(jobs=8))
    await queue.start()
    terms = Placement(key=KeyTerms("k", 2.0, 0.5))
    for number in range(3):
        assert not await queue.enqueue(make_job(f"k{number}", "a"), terms)
    await redis.delete(KEYS.prefix + "queue:a")
    for _ in range(LOOKS_PER_CHECK):
        states = await queue.look_up(*((f"k{number}", 1) for number in range(3)))
        assert set(states) == {QueueState.WAITS}
    assert not await queue.enqueue(make_job("k3", "a"), terms)
    assert await queue.enqueue(make_job("k4", "a"), terms) == "key_jobs"
    assert await claimed(queue, 9) == "kkkk"


@pytest.mark.parametrize("seed", range(4))
async def test_the_service_of_two_keys_that_wait_differs_by_a_bounded_amount(seed: int) -> None:
    """Take the bound of Goyal et al., theorem 1: the largest job of each key, over its weight. Turns are rounded."""
    chance = random.Random(seed)
    print(f"seed {seed}")
    weights = {f"k{number}": chance.choice((0.1, 0.5, 1.0, 2.0, 7.0)) for number in range(chance.randint(2, 5))}
    most, queue = chance.choice((8, 200)), ClockedQueue()
    await queue.start()
    bound = {key: (40 * PROMPT_WEIGHT + most * OUTPUT_WEIGHT) / weight + 1 for key, weight in weights.items()}
    served, waiting = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0)
    leads: dict[tuple[str, str], list[float]] = {}
    keys: dict[str, str] = {}
    for number in range(400):
        if chance.random() < 0.5 or not any(waiting.values()):
            key = chance.choice(list(weights))
            job = make_job(f"{number}", "a", prompt=chance.randint(1, 40), max_tokens=chance.randint(1, most))
            assert not await queue.enqueue(job, weighted(key, weights[key]))
            keys[job.job_id] = key
            waiting[key] += 1
        else:
            (job,) = (await queue.claim("w", ONE)).jobs
            key = keys[job.job_id]
            work = PROMPT_WEIGHT * len(job.prompt_ids) + OUTPUT_WEIGHT * job.stopping.max_tokens
            served[key] += work / weights[key]
            waiting[key] -= 1
        for pair in combinations(weights, 2):
            if not all(waiting[key] for key in pair):
                leads.pop(pair, None)
                continue
            lead = leads.setdefault(pair, [])
            lead.append(served[pair[0]] - served[pair[1]])
            assert max(lead) - min(lead) <= sum(bound[key] for key in pair)
