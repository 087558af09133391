"""A run: the cluster, its clients, and one fault after the other (or several at once), all into a history."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from loraplex.contracts.broker.terms import REFUND_RECORD_MS
from tests.trials.chaos.arena import Arena
from tests.trials.chaos.cluster import WORKERS, ChaosCluster, chaos_cluster
from tests.trials.chaos.driver import Driver
from tests.trials.chaos.faults import STRIKERS
from tests.trials.chaos.history import Account, Begun, Charged, CrowdCall, Fault, History, Idle, Left
from tests.trials.chaos.ledger import (
    RESTLESS,
    Prices,
    commands_s,
    draw_plans,
    draw_prices,
    draw_quotas,
    read_events,
    read_ledger,
    use_quotas,
)
from tests.trials.chaos.plan import MODEL, Plan, PlannedFault

log = logging.getLogger(__name__)

# So long the cluster has to be whole again after a fault was mended, and to be idle after the last request.
RECOVERY_S = 45.0
# Error of a fault whose victim, crowd or proof did not come in time, and number of tries where other faults may have
# prevented it.
PREVENTED, TRIES = "it could not happen", 3
# Maximum number of faults at once, where they may overlap.
OVERLAPPING = 3


async def run(plan: Plan, directory: Path, path: Path) -> None:
    """Run the plan; everything that happens is appended to the file at `path`."""
    history = History(path)
    history.append(Begun(MODEL, plan.seed, plan.requests, plan.planned, plan.overlap, plan.ledger))
    try:
        async with chaos_cluster(directory, draw_plans(plan) if plan.ledger else "") as (cluster, revisions):
            quotas = draw_quotas(plan) if plan.ledger else ()
            for quota in quotas:
                history.append(quota)
            await use_quotas(quotas, cluster.valkeys.primary.client, cluster.store)
            driver = Driver(plan, [door.address for door in cluster.doors.values()], revisions, history)
            await cluster.unless_failed(_strike_and_send(plan, Arena(cluster, driver), history))
            history.append(await _left(cluster))
            for line in await _charged(cluster, draw_prices(plan)) if plan.ledger else ():
                history.append(line)
            if plan.ledger:
                history.append(Idle(await commands_s(cluster.valkeys.primary.client)))
    finally:
        history.close()


async def _charged(cluster: ChaosCluster, prices: Prices) -> list[Charged | Account]:
    """Return the ledger's counts; those so far where it does not come to rest."""
    usage = [cluster.usage_file(name) for name in cluster.doors]
    try:
        async with asyncio.timeout(RECOVERY_S):
            return await read_ledger(cluster.valkeys.primary.client, usage, prices)
    except TimeoutError:
        log.warning("the ledger has open reservations or charges that nobody wrote")
        return [*read_events(usage, prices), Account("", RESTLESS)]


async def _strike_and_send(plan: Plan, arena: Arena, history: History) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(arena.driver.run())
        group.create_task(_strike_all(plan, arena, history))


async def _strike_all(plan: Plan, arena: Arena, history: History) -> None:
    room = asyncio.Semaphore(OVERLAPPING if plan.overlap else 1)

    async def strike(planned: PlannedFault) -> None:
        try:
            fault, calls = await _strike(arena, planned, alone=not plan.overlap)
            for _ in range(TRIES - 1):
                if plan.overlap and not fault.proof and fault.error in {"", PREVENTED}:
                    fault, calls = await _strike(arena, planned, alone=False)
            history.append(fault)
            for call in calls:
                history.append(call)
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        for planned in plan.faults:
            await room.acquire()
            # This fault's share of the requests, and those of the ones before it.
            share = plan.requests * (planned.number + 1) // (len(plan.faults) + 1)
            await arena.driver.allow(max(share, plan.in_flight))
            await arena.driver.until_streaming(min(plan.in_flight // 2, 2))
            await asyncio.sleep(planned.wait_s)
            group.create_task(strike(planned))
    await arena.driver.finish()


async def _strike(arena: Arena, planned: PlannedFault, *, alone: bool) -> tuple[Fault, Sequence[CrowdCall]]:
    """Carry out a fault, from its beginning to the cluster's recovery; return it with the calls of its crowd."""
    calls: Sequence[CrowdCall] = ()
    fault = Fault(planned.number, planned.kind.value, "", 0.0, 0.0, [])
    try:
        async with STRIKERS[planned.kind](arena, planned) as strike:
            pass  # until it has been mended
        fault.victim, fault.began, fault.hit, fault.proof = strike.victim, strike.began, strike.hit, strike.proof
        fault.mended, calls = arena.driver.now, strike.calls
        async with asyncio.timeout(RECOVERY_S):
            await arena.driver.until_moved(fault.hit)
            if alone:
                await _whole(arena.cluster)
    except TimeoutError:
        fault.error = f"no recovery in {RECOVERY_S:g} s" if fault.proof else PREVENTED
    except Exception as error:
        log.exception("fault %d", planned.number)
        fault.error = f"{type(error).__name__}: {error}"
    finally:
        arena.release(planned)
    log.info("%s of %s: %s %s", fault.kind, fault.victim, fault.proof, fault.error)
    return fault, calls


async def _whole(cluster: ChaosCluster) -> None:
    """Wait until every process that is to serve does, and is known to."""
    await cluster.wait_serving(RECOVERY_S)
    while True:
        try:
            if len(await cluster.workers()) == WORKERS:
                return
        except Exception as error:  # a router that has just started, or Redis
            log.debug("not whole yet: %s", error)
        await asyncio.sleep(0.05)


async def _left(cluster: ChaosCluster) -> Left:
    """Return what an idle cluster holds: nothing, or what it still does after enough time."""
    left = Left(0, 0, ["nobody could look"])
    try:
        # What was refunded to a killed router's jobs is remembered for a while, in case that they are claimed again.
        async with asyncio.timeout(RECOVERY_S + REFUND_RECORD_MS / 1e3):
            await _whole(cluster)
            while True:
                left = await cluster.left()
                if not (left.blocks or left.pins or left.redis_keys):
                    break
                await asyncio.sleep(0.2)  # workers report twice a second
    except TimeoutError:
        log.warning("not idle: %s", left)
    return left
