"""The cost of the queue's scripts, and of what routers ask: a real server's processor time, over its socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from statistics import median
from typing import Any

from redis.asyncio import Redis

from bench.scaling_cluster import BASE
from bench.valkey import running_valkey
from loraplex.contracts.broker.connection import connect
from loraplex.contracts.broker.functions import Library, shipped_functions
from loraplex.contracts.broker.keys import LEDGER, Keys
from loraplex.contracts.broker.ledger import Ledger
from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import AdapterRef, Capacity, Job, WorkerPhase, WorkerState
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import ROLL_MS, Placement, QueueLimits, UsageReport
from loraplex.contracts.options import SamplingParams, StoppingParams

# Waiting jobs during the measurement, their tenants, and the adapters that a claiming worker reports.
_WAITING, _TENANTS, _ADAPTERS = 1_000, 100, 32
_LIMITS = QueueLimits(jobs=1 << 30, tenant_jobs=1 << 30)
# Connections that call at once: a shard that uses 70% of a core always has several calls to answer.
_CALLERS = 8
# Number of passes, each with a server of its own: on a shared machine one pass differs from the next by a tenth.
_PASSES = 3
ENQUEUE, CLAIM, CLAIM_8, FULL_CLAIM, EMPTY_CLAIM, CHARGE, WAITING = (
    "enqueue",
    "claim of a job",
    "claim of 8 jobs",
    "claim of a full worker",
    "claim of none",
    "charge of 16",
    "16 waiting?",
)


def measure_costs(calls: int) -> dict[str, float]:
    """Return the microseconds of the server's processor time a call, by operation: the median of _PASSES passes."""
    passes = []
    for _ in range(_PASSES):
        with running_valkey() as url:
            passes.append(asyncio.run(_measure(url, calls)))
    return {operation: median(each[operation] for each in passes) for operation in passes[0]}


async def _measure(url: str, calls: int) -> dict[str, float]:
    redis = await connect(url)
    keys = Keys("model", "main")
    queues = [JobQueue(redis, keys, limits=_LIMITS, worker_id=f"w{number}") for number in range(_CALLERS)]
    adapters = tuple(f"sha256:{number:064x}" for number in range(_ADAPTERS))
    placement = Placement(prefer=("w1", "w2", "w3"), load_tokens=10.0)
    numbers, beats = count(1), count(1)
    # Jobs that were claimed one at a time: they run, and are charged.
    running: list[str] = []

    async def enqueue(queue: JobQueue) -> None:
        await queue.enqueue(_job(next(numbers)), placement)

    def claim(rows: int, jobs: int) -> Callable[[JobQueue], Awaitable[None]]:
        capacity = Capacity(rows, 32, 1 << 20, 1 << 20, 64, adapters)

        async def claim_rows(queue: JobQueue) -> None:
            claimed = await queue.claim(BASE, capacity)
            if len(claimed.jobs) != jobs:
                raise RuntimeError(f"a claim of {rows} rows took {len(claimed.jobs)} jobs")
            running.extend(job.job_id for job in claimed.jobs)

        return claim_rows

    async def charge(queue: JobQueue) -> None:
        beat = next(beats)
        await queue.charge(
            [UsageReport(running[(16 * beat + job) % min(len(running), 1_000)], 1, 10 * beat) for job in range(16)]
        )

    async def look(queue: JobQueue) -> None:
        latest = next(numbers)
        await queue.look_up([(f"j{latest - back}", 1) for back in range(16)])

    async def cost(times: int, call: Callable[[JobQueue], Awaitable[None]]) -> float:
        """Return the microseconds of a call, of which each queue makes its part, one after the other."""
        each = max(1, times // _CALLERS)

        async def repeat(queue: JobQueue) -> None:
            for _ in range(each):
                await call(queue)

        before = await used_s(redis)
        await asyncio.gather(*map(repeat, queues))
        return (await used_s(redis) - before) / (each * _CALLERS) * 1e6

    await cost(_WAITING, enqueue)
    costs = {ENQUEUE: await cost(calls, enqueue), CLAIM: await cost(calls, claim(1, 1))}
    await cost(calls, enqueue)
    costs[CLAIM_8] = await cost(calls // 8, claim(8, 8))
    costs[FULL_CLAIM] = await cost(calls, claim(0, 0))
    costs[WAITING] = await cost(calls, look)
    costs[CHARGE] = await cost(calls, charge)
    while (await queues[0].claim(BASE, Capacity(32, 32, 1 << 20, 1 << 20, 64, adapters))).jobs:
        pass
    costs[EMPTY_CLAIM] = await cost(calls, claim(32, 0))
    await redis.aclose()
    return costs


# Adapters on a worker; of so many workers one has loaded an adapter since its last beat half a second before: at 3 jobs
# a second, of which 3% find no adapter.
_HELD, _UNCHANGED = 64, 20
# Looks that are measured, the interval of a router's looks in seconds, and routers that have ended in the last day.
_LOOKS, _LOOK_S, _ENDED = 8, 0.5, 1_000


def measure_looks(workers: int, routers: int) -> dict[str, float]:
    """Return what share of a core the censuses of so many routers take, and their renewals in the ledger."""
    with running_valkey() as url:
        return asyncio.run(_measure_looks(url, workers, routers))


async def _measure_looks(url: str, workers: int, routers: int) -> dict[str, float]:
    redis = await connect(url)
    keys = Keys("model", "main")
    # The first library makes the roll at every look; the second reads the one that is there.
    made, kept = (Library(shipped_functions(ROLL_MS=ms)) for ms in (0, 1 << 30))
    first, *others = [Liveness(redis, keys, library=library) for library in (made, *[kept] * _CALLERS)]
    states = [_state(number) for number in range(workers)]
    roll = f"{keys.prefix}roll:{kept.name}_"
    for number in range(routers):
        await first.take_census(f"10.0.0.{number}:50053")

    async def beat(look: int) -> None:
        for number, state in enumerate(states):
            held = state.adapters
            if number % _UNCHANGED == look % _UNCHANGED:
                held = (*held[1:], f"sha256:{workers * _HELD + look * workers + number:064x}")
            states[number] = replace(state, rows_running=(state.rows_running + 1) % 32, adapters=held)
            await first.beat(states[number])
            # This process has all beats and all looks, and is slow.
            await redis.pexpire(keys.worker(state.incarnation), 3_600_000)

    async def census(number: int, liveness: Liveness) -> None:
        found = await liveness.take_census(f"10.0.0.{number}:50053", workers * 0.75)
        if len(found.workers) != workers:
            raise RuntimeError(f"a census has {len(found.workers)} workers of {workers}")

    async def took(*calls: Awaitable[None]) -> float:
        before = await used_s(redis)
        await asyncio.gather(*calls)
        return (await used_s(redis) - before) / len(calls)

    makes, reads = [], []
    for look in range(_LOOKS + 1):
        await beat(look)
        await Liveness(redis, keys, library=kept).take_census()
        await redis.persist(roll)
        makes.append(await took(*(census(0, first) for _ in range(_CALLERS))))
        # The first look has rows to decode, while the server waits and its caches grow cold.
        await asyncio.gather(*(census(number, one) for number, one in enumerate(others, 1)))
        again = [census(number, one) for number, one in enumerate(others, 1) for _ in range(_CALLERS)]
        reads.append(await took(*again))
        await redis.delete(roll)
    # The first look reads all states.
    make, read = median(makes[1:]), median(reads[1:])
    censuses = routers / _LOOK_S * read + 1e3 / ROLL_MS * max(0.0, make - read)

    ledgers = [Ledger(redis, router=f"{number:012x}") for number in range(routers)]
    for ledger in ledgers:
        await ledger.fill([], closes=False)
    ended: Any = {f"ended{number}": f"5 {int(time.time() * 1e3) - 60_000}" for number in range(_ENDED)}
    await redis.hset(LEDGER + "routers", mapping=ended)
    renewals = [routers * await took(*map(_renew, ledgers)) for _ in range(_LOOKS + 1)]
    await redis.aclose()
    return {"censuses": censuses, "renewals": median(renewals[1:])}


async def _renew(ledger: Ledger) -> None:
    await ledger.tell([], renews=True)


def _state(number: int) -> WorkerState:
    return WorkerState(
        worker_id=f"worker-{number:04d}",
        incarnation=f"{number:016x}",
        phase=WorkerPhase.SERVING,
        model="model",
        base_digest=BASE,
        rows_running=24,
        rows_waiting=0,
        rows_limit=32,
        blocks_total=10_000,
        blocks_free=5_000,
        blocks_cached=100,
        blocks_referenced=4_000,
        slots_total=_HELD,
        slots_used=_HELD,
        slots_pinned=0,
        adapters=tuple(f"sha256:{number * _HELD + held:064x}" for held in range(_HELD)),
        max_rank=64,
        max_tokens=8_192,
        steps=1_000,
        host="host",
        pid=1,
        engine_pid=2,
    )


async def used_s(redis: Redis) -> float:
    """Return the processor time in seconds that the server has used since its start."""
    info = await redis.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def sized_job(number: int, tenants: int, adapter: AdapterRef | None) -> Job:
    """Return a job of 256 prompt tokens and an answer of 128, of one of the tenants."""
    return Job(
        job_id=f"j{number}",
        tenant=f"t{number % tenants}",
        model="model",
        base_digest=BASE,
        reply_to="127.0.0.1:50000",
        prompt_ids=tuple(range(256)),
        stopping=StoppingParams(128),
        sampling=SamplingParams(seed=number),
        adapter=adapter,
    )


def _job(number: int) -> Job:
    adapter = AdapterRef(f"tenants/t/adapters/a{number}", f"sha256:{number % 64:064x}", 16, 1 << 20)
    return sized_job(number, _TENANTS, adapter)
