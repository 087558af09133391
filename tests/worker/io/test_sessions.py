"""Engines that die, and the number of others that a worker starts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.worker.engine_api import CaptureFailedError, EngineConfig
from loraplex.worker.io.app import START_DEATHS_LIMIT, EngineSession, run_sessions
from loraplex.worker.io.engine_client import EngineLostError, EngineUnusableError
from loraplex.worker.io.metrics import WorkerMetrics


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
    """A session whose engine cannot be started with graphs; it stops where it is started without."""

    def __init__(self) -> None:
        base, telemetry = SimpleNamespace(name="m"), SimpleNamespace(worker_id="w")
        settings = SimpleNamespace(cell="0", engine_config=lambda: EngineConfig("m"))
        super().__init__(*cast(Any, (settings, base, None, None, None, telemetry, None)))
        self.configs: list[EngineConfig] = []

    async def _run(self, config: EngineConfig, stop: asyncio.Event) -> None:
        self.configs.append(config)
        if config.graphs:
            raise CaptureFailedError("decode steps run without CUDA graphs, capturing them failed: out of memory")


async def test_an_engine_whose_capture_fails_is_started_again_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    session = Starts()
    await session.run(asyncio.Event())
    assert session.configs == [EngineConfig("m"), EngineConfig("m", graphs=False)]
    assert "capturing them failed: out of memory; the engine starts again" in caplog.text
