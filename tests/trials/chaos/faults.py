"""The kinds of faults: what each does, and the proof that it happened."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from loraplex.contracts.broker.terms import HELD_MS
from loraplex.runtime.rpc.children.process import LaunchError
from tests.faulty_store import Fault as StoreFault
from tests.trials.chaos import crowd_faults, redis_faults
from tests.trials.chaos.arena import Arena, Strike
from tests.trials.chaos.links import Link, Way
from tests.trials.chaos.plan import TENANTS, Kind, PlannedFault
from tests.trials.chaos.processes import gone, killed, signal_process, stopped

Striker = Callable[[Arena, PlannedFault], AbstractAsyncContextManager[Strike]]


@asynccontextmanager
async def _worker_kill(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """The I/O process, and its engine with it."""
    victim = await arena.take_worker(planned)
    strike = Strike(victim.name, arena.driver.now, victim.streams)
    arena.cluster.kill(victim.name)
    code = await arena.cluster.processes[victim.name].exited
    await _until(lambda: gone(victim.engine_pid))
    if killed(code):
        strike.proof = f"process {victim.pid} ended with {code}, its engine {victim.engine_pid} is gone"
    yield strike
    await arena.cluster.start_worker()


@asynccontextmanager
async def _engine_kill(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    victim = await arena.take_worker(planned)
    strike = Strike(victim.name, arena.driver.now, victim.streams)
    if signal_process(victim.engine_pid, signal.SIGKILL):
        await _until(lambda: gone(victim.engine_pid))
        strike.proof = f"process {victim.engine_pid} is gone"
    yield strike


@asynccontextmanager
async def _worker_hang(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """The whole worker stands still as a machine does, or its I/O process alone."""
    victim = await arena.take_worker(planned)
    pids = [victim.pid, victim.engine_pid] if planned.hold < 0.5 else [victim.pid]
    async with _standing_still(arena, victim.name, victim.streams, pids) as strike:
        yield strike
        await asyncio.sleep(4.0 + planned.hold)


@asynccontextmanager
async def _engine_hang(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Stop an engine for a while; its worker may replace it before it wakes."""
    victim = await arena.take_worker(planned)
    async with _standing_still(arena, victim.name, victim.streams, [victim.engine_pid]) as strike:
        yield strike
        await asyncio.sleep(3.5 + 3.0 * planned.hold)


@asynccontextmanager
async def _standing_still(arena: Arena, victim: str, hit: list[int], pids: list[int]) -> AsyncIterator[Strike]:
    strike = Strike(victim, arena.driver.now, hit)
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await _until(lambda: all(stopped(pid) for pid in pids))
        strike.proof = f"processes {pids} stood still"
        yield strike
    finally:
        for pid in pids:
            signal_process(pid, signal.SIGCONT)


@asynccontextmanager
async def _router_kill(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    name, hit = await arena.take_router(planned)
    strike = Strike(name, arena.driver.now, hit)
    arena.cluster.kill(name)
    code = await arena.cluster.processes[name].exited
    if killed(code):
        strike.proof = f"process {arena.cluster.processes[name].pid} ended with {code}"
    yield strike
    await asyncio.sleep(planned.hold)
    await arena.cluster.restart(name)


@asynccontextmanager
async def _router_stop(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Stop a router for longer than its lease, so that another one ends its reservations before it goes on."""
    name, hit = await arena.take_router(planned)
    async with _standing_still(arena, name, hit, [arena.cluster.processes[name].pid]) as strike:
        yield strike
        await asyncio.sleep(HELD_MS / 1e3 + 1.0 + 3.0 * planned.hold)


@asynccontextmanager
async def _restart_wipe(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Restart all routers in turn, so that none has what another one charged, and wipe Redis then."""
    cluster, names = arena.cluster, sorted(arena.cluster.doors)
    for name in (*names, "redis"):
        await arena.take([name], planned)
    strike = Strike(", ".join(names), arena.driver.now, arena.driver.streaming)
    for name in names:
        cluster.kill(name, signal.SIGTERM)
        if code := await cluster.processes[name].exited:
            raise LaunchError(f"{name} ended with {code} when it was told to stop")
        await cluster.restart(name)
        await cluster.wait_serving()
    strike.proof = await cluster.valkeys.wipe()
    yield strike


def _link(disturb: Callable[[Link, PlannedFault], int | None], lasts_s: float) -> Striker:
    """Disturb every link of a host, or one; `disturb` returns how many connections it broke, or None."""

    @asynccontextmanager
    async def strike(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
        struck, links = await _take_links(arena, planned)
        struck.began = arena.driver.now
        disturbed = [link.disturbed for link in links]
        try:
            broken = [disturb(link, planned) for link in links]
            if None not in broken:
                struck.proof = _broken(sum(count or 0 for count in broken))
            yield struck
            await asyncio.sleep((0.3 + 0.7 * planned.hold) * lasts_s)
            held = sum(link.disturbed for link in links) - sum(disturbed)
            if not struck.proof and held:
                struck.proof = f"{held} pieces came late"
        finally:
            for link in links:
                link.heal()

    return strike


def _broken(count: int) -> str:
    return f"{count} connections were broken" if count else ""


async def _take_links(arena: Arena, planned: PlannedFault) -> tuple[Strike, list[Link]]:
    where = int(planned.pick * 5 * 7) % 5
    if where < 2:
        name, hit = await arena.take_router(planned)
        link, what = (arena.cluster.links[name].redis, "Redis") if where else (arena.cluster.doors[name], "its clients")
        return Strike(f"{name} from {what}", 0.0, hit), [link]
    victim = await arena.take_worker(planned)
    pair = arena.cluster.links[victim.name]
    links, what = {
        2: ([pair.grpc], "routers and store"),
        3: ([pair.redis], "Redis"),
        4: ([pair.grpc, pair.redis], "everybody"),
    }[where]
    return Strike(f"{victim.name} from {what}", 0.0, victim.streams), links


def _hold(link: Link, planned: PlannedFault) -> None:
    link.hold(Way.UP if planned.hold < 0.5 else Way.DOWN)


def _delay(link: Link, planned: PlannedFault) -> None:
    link.delay(0.05 + 0.15 * planned.hold)


@asynccontextmanager
async def _relay_unreachable(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Cut a worker off from the relay of one router, or of all; it reaches Redis and the store."""
    victim = await arena.take_worker(planned)
    link, store = arena.cluster.links[victim.name].grpc, arena.cluster.settings.worker_flags[1]
    strike = Strike(victim.name, arena.driver.now, victim.streams)
    relays = sorted(link.targets - {store})
    cut = relays if planned.hold < 0.5 else relays[:1]
    try:
        strike.proof = _broken(sum(link.cut_target(relay) for relay in cut))
        yield strike
        await asyncio.sleep(4.0 + 3.0 * planned.hold)
    finally:
        link.heal()


@asynccontextmanager
async def _redis_unreachable(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Cut a worker off from Redis for longer than its liveness key lasts; routers and store stay."""
    victim = await arena.take_worker(planned)
    link = arena.cluster.links[victim.name].redis
    strike = Strike(victim.name, arena.driver.now, victim.streams)
    try:
        strike.proof = _broken(link.cut())
        yield strike
        await asyncio.sleep(4.0 + 4.0 * planned.hold)
    finally:
        link.heal()


def _store(fault: StoreFault) -> Striker:
    """A new adapter, which no worker has, while the store is slow or sends other bytes; other streams go on."""

    @asynccontextmanager
    async def strike(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
        store, driver = arena.cluster.faulty_store, arena.driver
        name = f"cold-{planned.number}"
        victim = await arena.take(["store"], planned)
        store.faults[name] = fault
        revision = await arena.cluster.push(TENANTS[planned.number % 2], name)
        struck = Strike(victim, driver.now, driver.streaming)
        try:
            driver.cold.extend([revision] * 3)
            await driver.allow_more(4)
            await store.asked(name)
            struck.proof = f"{name} was asked for while {fault}"
            yield struck
            await asyncio.sleep(0.5 + planned.hold)
        finally:
            store.gate.set()
            store.gate = asyncio.Event()
            del store.faults[name]

    return strike


@asynccontextmanager
async def _store_kill(arena: Arena, planned: PlannedFault) -> AsyncIterator[Strike]:
    """Kill the store while a worker fetches a new adapter; it is back in a moment, and nobody notices."""
    store, cluster, name = arena.cluster.faulty_store, arena.cluster, f"killed-{planned.number}"
    strike = Strike(await arena.take(["store"], planned), 0.0, arena.driver.streaming)
    store.faults[name] = StoreFault.GATED
    try:
        arena.driver.cold.extend([await cluster.push(TENANTS[planned.number % 2], name)] * 3)
        await arena.driver.allow_more(4)
        await store.asked(name)
        strike.began = arena.driver.now
        cluster.kill("store")
        code = await cluster.processes["store"].exited
        if killed(code):
            strike.proof = f"the store ended with {code} while {name} was on its way"
    finally:
        store.gate.set()
        store.gate = asyncio.Event()
        del store.faults[name]
    yield strike
    await cluster.restart("store")


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 — another process's state has no event
            await asyncio.sleep(0.001)


STRIKERS: dict[Kind, Striker] = {
    Kind.WORKER_KILL: _worker_kill,
    Kind.ENGINE_KILL: _engine_kill,
    Kind.WORKER_HANG: _worker_hang,
    Kind.ENGINE_HANG: _engine_hang,
    Kind.ROUTER_KILL: _router_kill,
    Kind.REDIS_RESTART: redis_faults.restart,
    Kind.REDIS_WIPE: redis_faults.wipe,
    Kind.REDIS_FAILOVER: redis_faults.failover,
    Kind.REDIS_SLOW: redis_faults.slow,
    Kind.REDIS_CLOCK: redis_faults.clock_ahead,
    Kind.LINK_CUT: _link(lambda link, planned: link.cut(), 2.0),
    Kind.LINK_ONE_WAY: _link(_hold, 4.0),
    Kind.LINK_DELAY: _link(_delay, 2.0),
    Kind.STORE_SLOW: _store(StoreFault.GATED),
    Kind.STORE_LIES: _store(StoreFault.GARBLED),
    Kind.RELAY_UNREACHABLE: _relay_unreachable,
    Kind.REDIS_UNREACHABLE: _redis_unreachable,
    Kind.REDIS_FULL: redis_faults.full,
    Kind.KEYS_LOST: redis_faults.keys_lost,
    Kind.QUEUE_FULL: crowd_faults.queue_full,
    Kind.GREEDY_TENANTS: crowd_faults.greedy_tenants,
    Kind.BURST: crowd_faults.burst,
    Kind.OVERSIZE: crowd_faults.oversize,
    Kind.SLOW_READER: crowd_faults.slow_reader,
    Kind.BASE_REPLACED: crowd_faults.base_replaced,
    Kind.ROUTER_KILL_FULL: crowd_faults.router_kill_full,
    Kind.ROUTER_RESTART: crowd_faults.router_restart,
    Kind.STORE_KILL: _store_kill,
    Kind.ROUTER_STOP: _router_stop,
    Kind.RESTART_WIPE: _restart_wipe,
}
