"""The faults that a crowd makes or sees: full queues, bursts, floods, slow readers, other models, routers that stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from loraplex.contracts.broker.keys import Keys
from loraplex_client import AsyncClient
from tests.trials.chaos.arena import Arena, Strike
from tests.trials.chaos.cluster import CLIENT_STALL_S, WAITING, register_model
from tests.trials.chaos.crowd import Crowd, Sort
from tests.trials.chaos.history import CrowdCall
from tests.trials.chaos.plan import IN_FLIGHT, MODEL_NAME, TENANTS, PlannedFault

# Callers that keep a tenant's share of the queue full: it, all rows, as many jobs that workers claimed ahead, and some
# that are refused.
_CALLERS = WAITING // 2 + 120
# Tenants that fill the cell's queue: so many that the share of each tenant holds all requests that the driver has in
# flight at once, which may all be one tenant's.
_FILLERS = WAITING // IN_FLIGHT - len(TENANTS)
# Calls of one client of the SDK: those that take most rows, and those that wait beside the driver's. Half of the latter
# are more than its budget of retries.
_RUNNING, _WAITERS = 40, WAITING - IN_FLIGHT - 8
# Smallest receive window that a gRPC client can have, so that a client that does not read blocks its router soon.
_SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0))


@asynccontextmanager
async def queue_full(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Fill a tenant's share of the queue, or the cell's whole queue with jobs of many tenants."""
    tenants = ["filler"] if planned.hold < 0.5 else [f"filler-{number}" for number in range(_FILLERS)]
    callers = _CALLERS if planned.hold < 0.5 else _CALLERS + WAITING
    async with _press(arena, planned, callers, tenants, 2.0 + 2.0 * planned.pick) as strike:
        yield strike


@asynccontextmanager
async def greedy_tenants(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Let two tenants ask for more than the whole cluster has."""
    async with _press(arena, planned, 2 * _CALLERS, ["greedy-1", "greedy-2"], 3.0 + 3.0 * planned.hold) as strike:
        yield strike


@asynccontextmanager
async def _press(
    arena: Arena, planned: PlannedFault, callers: int, tenants: list[str], seconds: float
) -> AsyncIterator[Strike]:
    await arena.take(["crowd"], planned)
    async with Crowd(arena, planned) as crowd:
        strike = Strike(", ".join(tenants), arena.driver.now, arena.driver.streaming, calls=crowd.calls)
        await crowd.press_until_refused(callers, Sort(tenants), seconds)
        yield strike
        await asyncio.sleep(seconds)
    strike.proof = crowd.ends()


@asynccontextmanager
async def waiting_crowd(arena: Arena, planned: PlannedFault) -> AsyncIterator[list[CrowdCall]]:
    """Keep jobs of a crowd waiting in the queue while the context is open, at most three seconds; yield its calls."""
    await arena.take(["crowd"], planned)
    async with Crowd(arena, planned) as crowd:
        crowd.press(_CALLERS, Sort(["filler"]), 3.0)
        await crowd.until_streaming(8)
        yield crowd.calls


@asynccontextmanager
async def burst(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Begin thousands of calls in one moment, over one connection to each router or several."""
    await arena.take(["crowd"], planned)
    async with Crowd(arena, planned, channels=1 if planned.hold < 0.5 else 8) as crowd:
        tenants = [f"burst-{number}" for number in range(10)]
        strike = Strike("the routers", arena.driver.now, arena.driver.streaming, calls=crowd.calls)
        crowd.begin(2000 + int(1000 * planned.pick), Sort(tenants, tokens=(5, 20)))
        yield strike
    strike.proof = f"{crowd.begun} calls at once: {crowd.ends()}"


@asynccontextmanager
async def oversize(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Send texts of almost 4 MiB, more than any context, four to eight a second, and resumes of a megabyte."""
    await arena.take(["crowd"], planned)
    async with Crowd(arena, planned) as crowd:
        strike = Strike("the routers", arena.driver.now, arena.driver.streaming, calls=crowd.calls)
        sort = Sort(["oversize"], specs=(), prompt_bytes=4_190_000)
        crowd.resume(30_000)
        for _ in range(16):
            crowd.begin(1, sort)
            await asyncio.sleep(0.25 - 0.125 * planned.hold)
        yield strike
    strike.proof = crowd.ends()


@asynccontextmanager
async def slow_reader(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Read the first message of long answers and then nothing; the routers drop such clients after a while."""
    await arena.take(["crowd"], planned)
    async with Crowd(arena, planned, options=_SMALL_WINDOW) as crowd:
        strike = Strike("slow readers", arena.driver.now, arena.driver.streaming, calls=crowd.calls)
        slow = Sort(["slow"], tokens=(4000, 5000), logprobs=20, stops_s=2 * CLIENT_STALL_S, may_break=True)
        crowd.begin(4, slow)
        yield strike
        await crowd.until_ended()
        if not _any_too_slow(crowd):  # another fault ended them before: once more
            crowd.begin(4, slow)
    if _any_too_slow(crowd):
        strike.proof = crowd.ends()


def _any_too_slow(crowd: Crowd) -> bool:
    return any(call.reason == "CLIENT_TOO_SLOW" for call in crowd.calls)


@asynccontextmanager
async def base_replaced(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Register another base model under the name of one whose jobs wait and run; its only worker may die then."""
    await arena.take(["crowd"], planned)
    await arena.take(["store"], planned)  # no model is registered at a store that another fault has killed
    cluster, name = arena.cluster, f"base-{planned.number}"
    old, new = (f"hash:?vocab=32000&seed={seed + planned.number}&step_ms=10" for seed in (1000, 5000))
    sort = Sort(["owner"], tokens=(100, 300), model=name, specs=(old, new), may_break=True)
    workers = [f"worker-{name}-{which}" for which in ("old", "new")]
    try:
        await register_model(cluster.store, old, name)
        await cluster.start_worker_of(old, name, workers[0])
        async with Crowd(arena, planned) as crowd:
            # More callers than rows: some jobs wait.
            crowd.press(24, sort, 8.0)
            await crowd.until_streaming(4)
            strike = Strike(name, arena.driver.now, arena.driver.streaming, calls=crowd.calls)
            await register_model(cluster.store, new, name)
            await cluster.start_worker_of(new, name, workers[1])
            if planned.hold < 0.5:
                cluster.kill(workers[0])
            yield strike
        strike.proof = f"{workers[0]} {'died' if planned.hold < 0.5 else 'went on'}: {crowd.ends()}"
    finally:
        for worker in workers:
            if worker in cluster.processes:
                cluster.kill(worker)


@asynccontextmanager
async def router_kill_full(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Kill a router while other tenants' jobs fill the queue: its streams go on at the other router."""
    await arena.take(["crowd"], planned)
    async with Crowd(arena, planned) as crowd:
        await crowd.press_until_refused(2 * _CALLERS, Sort(["filler-1", "filler-2"]), 5.0 + planned.hold)
        name, hit = await arena.take_router(planned)
        strike = Strike(name, arena.driver.now, hit, calls=crowd.calls)
        arena.cluster.kill(name)
        code = await arena.cluster.processes[name].exited
        yield strike
        await asyncio.sleep(planned.hold)
        await arena.cluster.restart(name)
    strike.proof = f"process {arena.cluster.processes[name].pid} ended with {code}: {crowd.ends()}"


@asynccontextmanager
async def router_restart(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Restart a router in order while requests wait in the queue, or each router after the other: none fails."""
    await arena.take(["crowd"], planned)
    cluster, queue = arena.cluster, Keys(MODEL_NAME, "main").waiting
    names = sorted(cluster.doors)
    names = names if planned.hold < 0.5 else names[:: 1 if planned.pick < 0.5 else -1][:1]
    for name in names:
        await arena.take([name], planned)
    waited, codes = 0, list[int | None]()
    async with AsyncExitStack() as clients, Crowd(arena, planned) as crowd:
        strike = Strike(", ".join(names), arena.driver.now, arena.driver.streaming, calls=crowd.calls)
        for name in names:
            # A new one: the channel of the last one may not know yet that its router is back.
            client = await clients.enter_async_context(AsyncClient(cluster.routers))
            sort = Sort([f"waiter-{number}" for number in range(4)], tokens=(300, 500), sdk=client)
            crowd.begin(_RUNNING, sort)
            await _until_admitted(arena, crowd, claimed=True)
            waiting = 0
            while not waiting:
                crowd.begin(_WAITERS, sort)
                await _until_admitted(arena, crowd)
                waiting = await cluster.valkeys.primary.client.zcard(queue)
            waited += waiting
            cluster.kill(name, signal.SIGTERM)
            codes.append(await cluster.processes[name].exited)
            await cluster.restart(name)
            await cluster.wait_serving()
        yield strike
    if waited and not any(codes):
        strike.proof = f"{waited} requests waited, and the routers ended with 0: {crowd.ends()}"


async def _until_admitted(arena: Arena, crowd: Crowd, *, claimed: bool = False) -> None:
    """Wait until each call of waiters has ended or has a job, one that a worker has claimed where `claimed`."""
    async with asyncio.timeout(60):
        while True:
            jobs = [job for job in await arena.cluster.jobs() if job.tenant.startswith("waiter-")]
            if sum(bool(job.worker_id) or not claimed for job in jobs) + len(crowd.calls) >= crowd.begun:
                return
            await asyncio.sleep(0.05)
