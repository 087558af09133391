"""The acts of operators in a run, each with its time: a purge, a key's end, a worker without key or store, a drain."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from random import Random

from redis.exceptions import ConnectionError as RedisConnectionError

from loraplex.contracts.broker.cells import DrainedCells
from loraplex.contracts.broker.queue import JobQueue
from tests.simulation.faults import Cluster, Fault, Kind

# Tenants that may be purged: the adapters are another one's.
_PURGED = ("two", "three")
# Number of passes of a purge, interval between them in seconds, and timeout of a pass in seconds: routers may be dead.
_PASSES, _PASS_S, _PURGE_S = 3, 0.25, 8.0


def draw_acts(chance: Random, until_s: float, keys: int) -> list[Fault]:
    """Draw acts: the purge of a tenant, the end of one of so many keys, a worker without the job key, an old store.

    `worker` says which tenant, key or worker.
    """
    of_keys = [Kind.KEY_REVOKED] if keys else []
    kinds = [Kind.TENANT_PURGED, *of_keys, Kind.SEALS_REFUSED, Kind.STORE_CUT, *([Kind.STORE_OLD] if keys else [])]
    return [
        Fault(kind, chance.uniform(0.5, until_s), 2.5, chance.randrange(keys or len(_PURGED)), 0)
        for kind in kinds
        if chance.random() < 0.15 + 0.35 * (kind in {Kind.KEY_REVOKED, Kind.STORE_OLD})
    ]


def draw_drain(chance: Random, until_s: float) -> list[Fault]:
    """Draw the drain of a cell, whose number `worker` is; in every third the Redis of the other one is lost in it."""
    drain = Fault(Kind.CELL_DRAINED, chance.uniform(0.5, until_s), chance.uniform(0.5, 3.0), chance.randrange(2), 0)
    if chance.random() < 2 / 3:
        return [drain]
    drain = replace(drain, length_s=chance.uniform(5.0, 9.0))
    return [drain, Fault(Kind.REDIS_DOWN, drain.at_s + chance.uniform(0.0, 1.0), drain.length_s, 1 - drain.worker, 0)]


async def _drain_cell(fault: Fault, cluster: Cluster) -> None:
    """Drain a cell, and open it again; while Redis is away that has no effect."""
    names = [redis.cell.cell for redis in cluster.redis]
    drained, name = DrainedCells(cluster.redis[0].client), names[fault.worker]
    with contextlib.suppress(RedisConnectionError):
        await drained.drain(name, [other for other in names if other != name])
    await asyncio.sleep(fault.length_s)
    with contextlib.suppress(RedisConnectionError):
        await drained.open(name)


async def _purge(fault: Fault, cluster: Cluster) -> None:
    """Remove a tenant's data from routers, workers and Redis; the tenant goes on to call."""
    tenant = _PURGED[fault.worker % len(_PURGED)]
    queues = [JobQueue(redis.client, redis.cell) for redis in cluster.redis]
    for _ in range(_PASSES):
        purges = {one.node.start(one.forget_tenant(tenant)) for one in cluster.routers if not one.node.dead}
        if purges:
            await asyncio.wait(purges, timeout=_PURGE_S)
        for queue in queues:
            with contextlib.suppress(RedisConnectionError):
                await queue.forget_tenant(tenant)
        await asyncio.sleep(_PASS_S)


async def _revoke(fault: Fault, cluster: Cluster) -> None:
    """Revoke an API key at the store; routers look for that."""
    key = [*cluster.store.keys.values()][fault.worker]
    cluster.store.keys[key.key_id] = replace(key, revoked=True)
    cluster.store.revoked_at[key.key_id] = time.monotonic()


async def _cut_store_off(fault: Fault, cluster: Cluster) -> None:
    """Let routers be answered by a store that does not reach its bucket, and so has a copy that gets older."""
    cluster.store.cut_off = time.monotonic(), dict(cluster.store.keys)
    await asyncio.sleep(fault.length_s)
    cluster.store.cut_off = None


async def _refuse_seals(fault: Fault, cluster: Cluster) -> None:
    """Let a worker take no job that it claims, as one without the newest job key; its routers miss them."""
    worker = cluster.workers[fault.worker % len(cluster.workers)].name
    for redis in cluster.redis:
        redis.refusing.add(worker)
    await asyncio.sleep(fault.length_s)
    for redis in cluster.redis:
        redis.refusing.discard(worker)


async def _cut_off(fault: Fault, cluster: Cluster) -> None:
    """Cut a worker off from the store alone, for less time than the last worker that a job has tries to fetch."""
    fetcher = cluster.workers[fault.worker % len(cluster.workers)].fetcher
    fetcher.cut_off = True
    await asyncio.sleep(fault.length_s)
    fetcher.cut_off = False


_ACT_OF = {
    Kind.TENANT_PURGED: _purge,
    Kind.KEY_REVOKED: _revoke,
    Kind.SEALS_REFUSED: _refuse_seals,
    Kind.STORE_CUT: _cut_off,
    Kind.STORE_OLD: _cut_store_off,
    Kind.CELL_DRAINED: _drain_cell,
}


async def act(fault: Fault, cluster: Cluster) -> bool:
    """Carry out an act of an operator; return True."""
    await asyncio.sleep(fault.at_s)
    await _ACT_OF[fault.kind](fault, cluster)
    return True
