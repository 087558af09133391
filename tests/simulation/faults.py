"""The faults of a run, drawn from its seed: each with its time, its victim and its length."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from loraplex.contracts.broker.terms import HELD_MS
from tests.simulation.network import Network
from tests.simulation.redis import SimulatedRedis
from tests.simulation.router import SimulatedRouter, SimulatedStore
from tests.simulation.worker import SimulatedWorker


class Kind(StrEnum):
    """The kinds of faults."""

    WORKER_KILL = "worker killed"
    WORKER_GONE = "worker's machine gone"
    WORKER_HANG = "worker stopped and woken"
    WORKER_DRAIN = "worker drained"
    ENGINE_KILL = "engine killed"
    ENGINE_HANG = "engine hangs"
    ENGINE_SLOW = "engine lacks the processor"
    ROUTER_KILL = "router killed"
    ROUTER_HANG = "router stopped and woken"
    ROUTER_DRAIN = "router drained"
    LINK_CUT = "link cut"
    LINK_HELD = "link silent"
    LINK_HALF_HELD = "link silent in one direction"
    REDIS_CUT = "worker cut off from Redis"
    REDIS_DOWN = "Redis down"
    REDIS_HANG = "Redis stopped and woken"
    REDIS_SLOW = "Redis slow"
    REDIS_WIPE = "Redis wiped"
    REDIS_ROLL_BACK = "Redis rolled back"
    REDIS_CLOCK = "Redis's clock ahead, then right"
    STORE_AWAY = "store away"
    TENANT_PURGED = "tenant purged"
    KEY_REVOKED = "API key revoked"
    SEALS_REFUSED = "worker refuses jobs' seals"
    STORE_CUT = "worker cut off from the store"
    STORE_OLD = "store cut off from its bucket"
    CELL_DRAINED = "cell drained and opened"


# Faults that take away what the queue remembers of service.
FORGETTING = frozenset({Kind.REDIS_WIPE, Kind.REDIS_ROLL_BACK})
# Acts of operators, which are drawn by a chance of their own: older seeds draw what they drew before.
ACTS = frozenset(
    {Kind.TENANT_PURGED, Kind.KEY_REVOKED, Kind.SEALS_REFUSED, Kind.STORE_CUT, Kind.STORE_OLD, Kind.CELL_DRAINED}
)
_RARE = {Kind.ENGINE_SLOW, Kind.ROUTER_DRAIN, Kind.REDIS_SLOW, Kind.REDIS_CLOCK, Kind.STORE_AWAY}
_FAULTS = [kind for kind in Kind if kind not in {*ACTS, *_RARE}]
_LOOK_S = 0.05
# Factor by which steps take longer on a busy processor: such a step outlasts the limit for one that hangs.
_SLOWNESS = 100.0
# Time in ms that Redis's clock is ahead.
_AHEAD_MS = 600_000
_LENGTHS_S = (0.05, 0.15, 0.5, 1.5, 4.0, 7.0)


@dataclass(frozen=True)
class Fault:
    """`worker` and `router` are numbers; a fault of a link is between the two."""

    kind: Kind
    at_s: float
    length_s: float
    worker: int
    router: int

    def __str__(self) -> str:
        return f"{self.at_s:6.2f} s: {self.kind} for {self.length_s:g} s (worker {self.worker}, router {self.router})"


def draw_faults(chance: Random, count: int, until_s: float, workers: int, routers: int) -> list[Fault]:
    """`count` faults in the order of their times."""
    faults = [
        Fault(
            chance.choice(_FAULTS),
            chance.uniform(0.1, until_s),
            chance.choice(_LENGTHS_S) * chance.uniform(0.8, 1.2),
            chance.randrange(workers),
            chance.randrange(routers),
        )
        for _ in range(count)
    ]
    return sorted(faults, key=lambda fault: fault.at_s)


def draw_outage(chance: Random, until_s: float, routers: int) -> list[Fault]:
    """Draw an outage of Redis in which routers die, before they can tell the ledger what they have sent."""
    at_s, length_s = chance.uniform(1.0, until_s), chance.choice(_LENGTHS_S[2:])
    outage = Fault(chance.choice((Kind.REDIS_DOWN, Kind.REDIS_HANG)), at_s, length_s, 0, 0)
    dead = chance.sample(range(routers), chance.randint(1, routers))
    kills = [(chance.uniform(at_s, at_s + length_s + 0.5), chance.choice(_LENGTHS_S), router) for router in dead]
    return [outage, *(Fault(Kind.ROUTER_KILL, kill_s, away_s, 0, router) for kill_s, away_s, router in kills)]


def draw_wipe(chance: Random) -> list[Fault]:
    """Draw, for every other backlog, a Redis that loses its data while most of the requests wait."""
    return [Fault(Kind.REDIS_WIPE, chance.uniform(1.05, 1.3), 0.0, 0, 0)] if chance.random() < 0.5 else []


def draw_older(chance: Random) -> list[Fault]:
    """Draw, for some seeds, a Redis that comes back 10 s older."""
    return [Fault(Kind.REDIS_ROLL_BACK, chance.uniform(0.1, 3.0), 10.0, 0, 0)] if chance.random() < 0.1 else []


def draw_throttle(chance: Random, workers: int) -> list[Fault]:
    """Draw, for some seeds, a time in which a worker's engine gets next to no processor time."""
    if chance.random() >= 0.1:
        return []
    return [Fault(Kind.ENGINE_SLOW, chance.uniform(0.1, 3.0), chance.uniform(3.0, 9.0), chance.randrange(workers), 0)]


def draw_clock(chance: Random, until_s: float) -> Fault:
    """Draw a time in which Redis's clock is ahead."""
    return Fault(Kind.REDIS_CLOCK, chance.uniform(0.1, until_s), chance.choice(_LENGTHS_S), 0, 0)


def draw_stop(chance: Random, until_s: float, routers: int) -> Fault:
    """Draw a time for which a router stands still, longer than others keep its reservations."""
    length_s = HELD_MS / 1e3 + chance.uniform(0.5, 3.0)
    return Fault(Kind.ROUTER_HANG, chance.uniform(1.0, until_s), length_s, 0, chance.randrange(routers))


def draw_restart_wipe(chance: Random, until_s: float, routers: int) -> list[Fault]:
    """Draw a restart of all routers in turn, so that none has what another one charged, and a wipe of Redis then."""
    at_s = chance.uniform(1.2, until_s)
    drains = [Fault(Kind.ROUTER_DRAIN, at_s + 0.6 * router, 0.1, 0, router) for router in range(routers)]
    return [*drains, Fault(Kind.REDIS_WIPE, drains[-1].at_s + chance.uniform(0.5, 3.0), 0.0, 0, 0)]


def draw_store(chance: Random, until_s: float) -> list[Fault]:
    """Draw a time in which the store does not answer, and a wipe of Redis in it."""
    away = Fault(Kind.STORE_AWAY, chance.uniform(1.0, until_s), chance.choice(_LENGTHS_S[2:]), 0, 0)
    return [away, Fault(Kind.REDIS_WIPE, away.at_s + chance.random() * away.length_s, 0.0, 0, 0)]


def draw_slow(chance: Random, until_s: float) -> Fault:
    """Draw a time in which each round trip to Redis takes more than half a second."""
    return Fault(Kind.REDIS_SLOW, chance.uniform(0.1, until_s), chance.uniform(4.0, 8.0), 0, 0)


def draw_restart(chance: Random, until_s: float, routers: int) -> list[Fault]:
    """Draw a restart in order of each router after the other, while requests wait."""
    at_s, length_s = chance.uniform(0.2, until_s), chance.choice(_LENGTHS_S[1:5])
    return [Fault(Kind.ROUTER_DRAIN, at_s + n * (length_s + 2.0), length_s, 0, n) for n in range(routers)]


@dataclass(frozen=True)
class Cluster:
    """The parts of a cluster that faults strike."""

    workers: Sequence[SimulatedWorker]
    routers: Sequence[SimulatedRouter]
    # Of each cell; the first is the home of all that is no queue's.
    redis: Sequence[SimulatedRedis]
    network: Network
    store: SimulatedStore


async def happen(fault: Fault, cluster: Cluster) -> bool:
    """Carry out a fault until all is well again; return False where no victim was there just then."""
    await asyncio.sleep(fault.at_s)
    worker, router = cluster.workers[fault.worker], cluster.routers[fault.router]
    match fault.kind:
        case Kind.WORKER_KILL | Kind.WORKER_GONE | Kind.WORKER_HANG | Kind.WORKER_DRAIN:
            return await _worker(fault, worker)
        case Kind.ENGINE_KILL | Kind.ENGINE_HANG | Kind.ENGINE_SLOW:
            return await _engine(fault, worker)
        case Kind.ROUTER_KILL | Kind.ROUTER_HANG | Kind.ROUTER_DRAIN:
            return await _router(fault, router)
        case Kind.LINK_CUT | Kind.LINK_HELD | Kind.LINK_HALF_HELD:
            await _link(fault, worker, router, cluster.network)
        case Kind.STORE_AWAY:
            cluster.store.away = True
            await asyncio.sleep(fault.length_s)
            cluster.store.away = False
        case Kind.REDIS_CUT:
            node = worker.node
            worker.redis.cut_off.add(node)
            await asyncio.sleep(fault.length_s)
            worker.redis.cut_off.discard(node)
        case _:
            await _redis(fault, cluster.redis[fault.worker % len(cluster.redis)])
    return True


async def _worker(fault: Fault, worker: SimulatedWorker) -> bool:
    if worker.node.frozen or worker.running.done():
        return False  # another fault has it
    node = worker.node
    if fault.kind is Kind.WORKER_HANG:
        worker.freeze()
        await asyncio.sleep(fault.length_s)
        if worker.node is node:
            worker.wake()
        return True
    if fault.kind is Kind.WORKER_DRAIN:
        worker.drain()
        # The worker may be killed while it drains; then whoever did that starts it again.
        while not worker.running.done() and worker.node is node and not node.dead:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        if worker.node is not node or node.dead:
            return True
    else:
        worker.kill(silently=fault.kind is Kind.WORKER_GONE)
    await asyncio.sleep(fault.length_s)
    if worker.node is node:  # of two that drained it one starts it again
        worker.start()
    return True


async def _engine(fault: Fault, worker: SimulatedWorker) -> bool:
    engine = worker.engine
    if engine is None or engine.node.frozen or worker.node.frozen:
        return False
    if fault.kind is Kind.ENGINE_KILL:
        engine.kill()
        return True
    if fault.kind is Kind.ENGINE_SLOW:
        engine.slowness = _SLOWNESS
        await asyncio.sleep(fault.length_s)
        engine.slowness = 1.0
        return True
    engine.node.frozen = True
    await asyncio.sleep(fault.length_s)
    if not worker.node.frozen:
        engine.node.wake()
    return True


async def _router(fault: Fault, router: SimulatedRouter) -> bool:
    if router.node.frozen:
        return False
    node = router.node
    if fault.kind is Kind.ROUTER_DRAIN:
        draining = node.start(router.drain())
        while not draining.done() and not node.dead:  # noqa: ASYNC110 — another fault may kill it meanwhile
            await asyncio.sleep(_LOOK_S)
        if node.dead:
            return True
    if fault.kind is not Kind.ROUTER_HANG:
        router.kill()
        await asyncio.sleep(fault.length_s)
        router.start()
        return True
    node.frozen = True
    await asyncio.sleep(fault.length_s)
    if router.node is node:
        node.wake()
    return True


async def _link(fault: Fault, worker: SimulatedWorker, router: SimulatedRouter, network: Network) -> None:
    ends = (worker.node, router.node)
    if fault.kind is Kind.LINK_CUT:
        network.cut(*ends)
    else:
        network.hold(*ends)
        if fault.kind is Kind.LINK_HELD:
            network.hold(*reversed(ends))
    await asyncio.sleep(fault.length_s)
    network.heal(*ends)


async def _redis(fault: Fault, redis: SimulatedRedis) -> None:
    match fault.kind:
        case Kind.REDIS_WIPE:
            redis.wipe()
        case Kind.REDIS_DOWN:
            redis.down = True
            await asyncio.sleep(fault.length_s)
            redis.restart()
        case Kind.REDIS_CLOCK:
            redis.ahead_ms += _AHEAD_MS
            await asyncio.sleep(fault.length_s)
            redis.ahead_ms -= _AHEAD_MS
        case Kind.REDIS_SLOW:
            redis.slow_s = 0.3
            await asyncio.sleep(fault.length_s)
            redis.slow_s = 0.0
        case Kind.REDIS_HANG:
            redis.node.frozen = True
            await asyncio.sleep(fault.length_s)
            redis.node.wake()
        case _:
            redis.save()
            await asyncio.sleep(fault.length_s)
            redis.roll_back()
