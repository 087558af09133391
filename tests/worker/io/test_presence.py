"""Test the beats of a worker whose Redis is slow, or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from loraplex.contracts.broker.messages import WorkerPhase, WorkerState
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.tenancy.guard import Guard
from loraplex.runtime.tenancy.permissions import Port
from loraplex.worker.io import membership
from loraplex.worker.io.membership import Presence
from loraplex.worker.io.metrics import WorkerMetrics
from tests.broker.test_liveness import worker
from tests.simulation.worker import SimulatedHealth


class UnansweredBeats:
    """Liveness in a Redis that gets every beat, and whose answers do not come."""

    def __init__(self) -> None:
        self.beats: asyncio.Queue[str] = asyncio.Queue()

    async def beat(self, state: Any) -> list[str]:
        self.beats.put_nowait("beat")
        await asyncio.get_running_loop().create_future()
        return []

    async def declare_dead(self, incarnation: str) -> None:
        self.beats.put_nowait("dead")
        await asyncio.get_running_loop().create_future()


async def test_no_beat_waits_for_the_answer_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a worker lives in Redis, and leaves it, however slow the answers are."""
    monkeypatch.setattr(membership, "BEAT_MS", 5)
    monkeypatch.setattr(membership, "BEAT_TIMEOUT_S", 600.0)
    monkeypatch.setattr(membership, "LEAVE_S", 0.01)
    liveness: Any = UnansweredBeats()
    health: Any = SimulatedHealth()
    followed: list[Sequence[str]] = []
    presence = Presence("w-1", liveness, health, lambda phase: worker("w"), followed.append)
    beating = asyncio.create_task(presence.beat())
    async with asyncio.timeout(60):
        assert [await liveness.beats.get() for _ in range(5)] == ["beat"] * 5
        presence.withdraw()
        while await liveness.beats.get() != "dead":
            pass
        assert await liveness.beats.get() == "dead"  # again, in case an earlier beat came later
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await presence.leave()
    assert followed == []


async def test_a_pause_of_claims_ends_no_drain() -> None:
    health: Any = SimulatedHealth()
    liveness: Any = UnansweredBeats()
    shown = list[WorkerPhase]()

    def state(phase: WorkerPhase) -> WorkerState:
        shown.append(phase)
        return worker("w")

    presence = Presence("w-1", liveness, health, state, lambda _: None)
    await presence.pause(True)
    await presence.announce_draining()
    await presence.pause(False)
    beating = asyncio.create_task(presence.beat())
    async with asyncio.timeout(60):
        await liveness.beats.get()
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    assert shown[-1] is WorkerPhase.DRAINING


class ToldRouters:
    """Liveness in a Redis that knows these routers."""

    def __init__(self) -> None:
        self.routers: list[str] = []

    async def beat(self, state: Any) -> list[str]:
        return self.routers


async def test_a_worker_whose_cell_no_router_serves_says_so(caplog: pytest.LogCaptureFixture) -> None:
    metrics, server, known = WorkerMetrics(), Server(Guard([Port.PUBLIC], [])), ToldRouters()
    server.on_serving = metrics.readiness.set_serving
    liveness: Any = known

    def follow(routers: Sequence[str]) -> None:
        metrics.readiness.note_routers(routers, "tiny", "second")

    presence = Presence("w-1", liveness, server, lambda phase: worker("w"), follow)
    why = "waits for a router that serves tiny in cell second of this Redis (--cells)"
    for routers, expected in (((), why), ((), why), (("r",), ""), ((), why)):
        known.routers = [*routers]
        await presence.announce()
        assert metrics.health.why_not("/readyz") == expected
        assert not metrics.health.why_not("/startupz"), "its start is done"
    assert caplog.messages.count(why) == 2
    await server.set_serving(False)
    assert metrics.health.why_not("/readyz") == "no engine serves"
