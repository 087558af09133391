"""The cost of the queue's scripts: a real server's processor time for each call, over its socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis

from bench.scaling_cluster import BASE
from bench.valkey import running_valkey
from broker.connection import connect
from broker.keys import Keys
from broker.messages import AdapterRef, Capacity, Job, StoppingParams
from broker.queue import JobQueue
from broker.terms import Placement, QueueLimits, UsageReport

# Waiting jobs during the measurement, their tenants, and the adapters that a claiming worker reports.
_WAITING, _TENANTS, _ADAPTERS = 1_000, 100, 32
_LIMITS = QueueLimits(jobs=1 << 30, tenant_jobs=1 << 30)
ENQUEUE, CLAIM, EMPTY_CLAIM, CHARGE, WAITING = (
    "enqueue",
    "claim of a job",
    "claim of none",
    "charge of 16",
    "16 waiting?",
)


def measure_costs(calls: int) -> dict[str, float]:
    """Return the microseconds of the server's processor time a call, by operation."""
    with running_valkey() as url:
        return asyncio.run(_measure(url, calls))


async def _measure(url: str, calls: int) -> dict[str, float]:
    redis = await connect(url)
    queue = JobQueue(redis, Keys("model", "main"), limits=_LIMITS, worker_id="w1")
    adapters = tuple(f"sha256:{number:064x}" for number in range(_ADAPTERS))
    one_row, all_rows = (
        Capacity(1, 32, 1 << 20, 1 << 20, 64, adapters),
        Capacity(32, 32, 1 << 20, 1 << 20, 64, adapters),
    )
    placement = Placement(prefer=("w1", "w2", "w3"), load_tokens=10.0)
    number = 0

    async def enqueue() -> None:
        nonlocal number
        number += 1
        await queue.enqueue(_job(number), placement)

    async def claim() -> None:
        claimed = await queue.claim(BASE, one_row)
        if len(claimed.jobs) != 1:
            raise RuntimeError("a claim took no job")

    async def claim_none() -> None:
        await queue.claim(BASE, all_rows)

    async def charge() -> None:
        await queue.charge([UsageReport(f"j{number - back}", 1, 10) for back in range(16)])

    async def look() -> None:
        await queue.look_up([(f"j{number - back}", 1) for back in range(16)])

    for _ in range(_WAITING):
        await enqueue()
    costs = {ENQUEUE: await _cost(redis, calls, enqueue), CLAIM: await _cost(redis, calls, claim)}
    costs[WAITING] = await _cost(redis, calls, look)
    costs[CHARGE] = await _cost(redis, calls, charge)
    while (await queue.claim(BASE, all_rows)).jobs:
        pass
    costs[EMPTY_CLAIM] = await _cost(redis, calls, claim_none)
    await redis.aclose()
    return costs


async def _cost(redis: Redis, calls: int, call: Callable[[], Awaitable[None]]) -> float:
    before = await used_s(redis)
    for _ in range(calls):
        await call()
    return (await used_s(redis) - before) / calls * 1e6


async def used_s(redis: Redis) -> float:
    """Return the processor time in seconds that the server has used since its start."""
    info = await redis.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def _job(number: int) -> Job:
    adapter = AdapterRef(f"tenants/t/adapters/a{number}", f"sha256:{number % 64:064x}", 16, 1 << 20)
    return Job(
        job_id=f"j{number}",
        tenant=f"t{number % _TENANTS}",
        model="model",
        base_digest=BASE,
        reply_to="127.0.0.1:50000",
        prompt_ids=tuple(range(256)),
        stopping=StoppingParams(128),
        seed=number,
        adapter=adapter,
    )
