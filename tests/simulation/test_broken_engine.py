"""A worker whose engines die of every sequence convicts nobody, and serves again once they do not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import WorkerPhase, WorkerState
from loraplex.router.catalog.cells import GONE_S
from loraplex.worker.io.app import EngineSession
from loraplex.worker.io.membership import Presence
from loraplex.worker.ipc import Add, Ready, ToEngine
from tests.simulation.engine import SimulatedEngine
from tests.simulation.faults import Fault, Kind
from tests.simulation.run import simulate_scenario
from tests.simulation.scenario import draw
from tests.simulation.stories import End
from tests.simulation.test_cut_links import plan

REQUESTS = 80
# Time in virtual seconds from which on, and until which, engines of the first worker die of whatever they get.
BROKEN_S = (3.0, 12.0)


def test_a_worker_with_a_broken_device_convicts_nobody_and_serves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths, phases, served_at = 0, list[WorkerPhase](), list[float]()
    apply, beat, prove = SimulatedEngine._apply, Liveness.beat, EngineSession._prove

    def die_of(engine: SimulatedEngine, message: ToEngine) -> None:
        nonlocal deaths
        broken = BROKEN_S[0] < asyncio.get_running_loop().time() < BROKEN_S[1]
        if broken and isinstance(message, Add) and engine.node.name.startswith("worker-0"):
            deaths += 1
            engine.kill()
        else:
            apply(engine, message)

    async def note(liveness: Liveness, state: WorkerState) -> list[str]:
        if state.worker_id == "worker-0":
            phases.append(state.phase)
        return await beat(liveness, state)

    async def proved(session: EngineSession, *arguments: object) -> None:
        await prove(session, *arguments)  # type: ignore[arg-type]
        served_at.append(asyncio.get_running_loop().time())

    monkeypatch.setattr(SimulatedEngine, "_apply", die_of)
    monkeypatch.setattr(Liveness, "beat", note)
    monkeypatch.setattr(EngineSession, "_prove", proved)
    plans = tuple(plan(number, 1.0 + number / 2, 20) for number in range(REQUESTS))
    cluster = {"workers": 2, "routers": 1, "rows": 8, "kv_blocks": 200, "backlog": False, "faults": ()}
    outcome = simulate_scenario(replace(draw(0), plans=plans, **cluster))  # type: ignore[arg-type]
    assert not outcome.wrong, str(outcome)
    assert outcome.ends == {End.COMPLETED: REQUESTS}
    last_failing = max(at for at, phase in enumerate(phases) if phase is WorkerPhase.FAILING)
    assert WorkerPhase.SERVING in phases[last_failing:]
    assert served_at[-1] > BROKEN_S[1]
    # A death in service, then another in each step of its own, with pauses that grow.
    assert 2 <= deaths <= 4


def test_a_worker_whose_engine_has_died_is_not_put_back_into_service(monkeypatch: pytest.MonkeyPatch) -> None:
    restored, restore = list[float](), Presence.restore

    async def note(presence: Presence) -> None:
        restored.append(asyncio.get_running_loop().time())
        await restore(presence)

    monkeypatch.setattr(Presence, "restore", note)
    plans = tuple(plan(number, 1.0 + number / 10, 60) for number in range(8))
    cluster = {"workers": 1, "routers": 1, "rows": 8, "kv_blocks": 200, "backlog": False}
    faults = (Fault(Kind.REDIS_HANG, 1.4, 1.0, 0, 0), Fault(Kind.ENGINE_KILL, 1.5, 0.0, 0, 0))
    outcome = simulate_scenario(replace(draw(0), plans=plans, faults=faults, **cluster))  # type: ignore[arg-type]
    assert not outcome.wrong, str(outcome)
    assert sorted(outcome.fired) == [Kind.REDIS_HANG, Kind.ENGINE_KILL]
    assert not restored


# Virtual seconds that an engine takes to start, longer than routers wait for a worker of which they hear nothing.
START_S = 3 * GONE_S


def test_calls_wait_while_the_only_worker_starts_its_engine_again_on_a_slow_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready = SimulatedEngine.ready

    async def ready_late(engine: SimulatedEngine) -> Ready:
        if asyncio.get_running_loop().time() > 1.0:
            await asyncio.sleep(START_S)
        return await ready(engine)

    monkeypatch.setattr(SimulatedEngine, "ready", ready_late)
    plans = tuple(plan(number, 1.0 + number, 20) for number in range(int(START_S)))
    cluster = {"workers": 1, "routers": 1, "rows": 8, "kv_blocks": 200, "backlog": False}
    faults = (Fault(Kind.ENGINE_KILL, 1.5, 0.0, 0, 0),)
    outcome = simulate_scenario(replace(draw(0), plans=plans, faults=faults, **cluster))  # type: ignore[arg-type]
    assert not outcome.wrong, str(outcome)
    assert outcome.fired == [Kind.ENGINE_KILL]
    assert outcome.ends == {End.COMPLETED: len(plans)}
    assert not outcome.reasons
