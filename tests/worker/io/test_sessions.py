"""Engines that die, and the number of others that a worker starts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.worker.engine_api import CaptureFailedError, EngineConfig
from loraplex.worker.io.app import START_DEATHS_LIMIT, EngineSession, run_sessions
from loraplex.worker.io.engine_client import EngineLostError, EngineProcess, EngineUnusableError
from loraplex.worker.io.metrics import WorkerMetrics
from loraplex.worker.ipc import Configure, Ready


class Sessions:
    """Engine sessions that end with a dead engine; `served` says of each whether it served. The last one stops all."""

    def __init__(self, *served: bool) -> None:
        self._served = list(served)
        self.stop = asyncio.Event()
        self.started = 0
        self.metrics = WorkerMetrics()

    async def run_all(self) -> None:
        """Run them as a worker does, without pauses."""
        await run_sessions(cast(Any, self._start), self.stop, self.metrics, restart_s=0.0)

    def _start(self) -> Session:
        self.started += 1
        session = Session(self._served.pop(0))
        if not self._served:
            self.stop.set()
        return session


class Session:
    """A session whose engine dies."""

    def __init__(self, served: bool) -> None:
        self.served = served
        self.state = self.former = None

    async def run(self, stop: asyncio.Event) -> None:
        """Lose the engine."""
        raise EngineLostError("the engine process 7 ended (signal 11, SIGSEGV)")


async def test_engines_that_die_before_any_has_served_end_the_worker() -> None:
    sessions = Sessions(*[False] * 10)
    with pytest.raises(EngineUnusableError, match=r"^the engine process 7 .*SIGSEGV\) before it served"):
        await sessions.run_all()
    assert sessions.started == START_DEATHS_LIMIT


async def test_a_worker_that_has_served_starts_another_engine_however_many_die() -> None:
    sessions = Sessions(False, True, *[False] * 10)
    await sessions.run_all()
    assert sessions.started == 12


class Starts(EngineSession):
    """A session whose engine cannot capture its steps, and dies without graphs; the third of these stops the worker."""

    def __init__(self, stop: asyncio.Event, configs: list[EngineConfig]) -> None:
        base, telemetry = SimpleNamespace(name="m"), SimpleNamespace(worker_id="w")
        settings = SimpleNamespace(cell="0", engine_config=lambda: EngineConfig("m"))
        super().__init__(*cast(Any, (settings, base, None, None, None, telemetry, None)))
        self._stop, self._configs = stop, configs

    async def _prepare(self, engine: EngineProcess) -> Ready:
        return await engine.ready()

    async def start(self, configure: Configure) -> Starts:
        """Start its engine, which is this object."""
        self._configs.append(configure.config)
        return self

    async def ready(self) -> Ready:
        """Fail as the engine does."""
        if self._configs[-1].graphs:
            raise CaptureFailedError("decode steps run without CUDA graphs, capturing them failed: out of memory")
        if len(self._configs) == 4:
            self._stop.set()
        self.served = True
        raise EngineLostError("the engine process 7 ended (signal 11, SIGSEGV)")

    async def stop(self) -> None:
        """Stop the engine."""


async def test_once_a_capture_has_failed_no_engine_of_the_worker_tries_graphs_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, configs = asyncio.Event(), list[EngineConfig]()

    def start() -> Starts:
        session = Starts(stop, configs)
        monkeypatch.setattr("loraplex.worker.io.app.EngineProcess.start", session.start)
        return session

    await run_sessions(start, stop, WorkerMetrics(), restart_s=0.0)
    assert configs == [EngineConfig("m"), *[EngineConfig("m", graphs=False)] * 3]
    assert "capturing them failed: out of memory; engines start without graphs from now on" in caplog.text
