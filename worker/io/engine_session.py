"""One life of the engine, and everything that depends on it.

What it held when it dies is handed back, so that the routers dispatch it again, from the last token; should this
process die as well, its links to the routers break, and they do the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import fields

from redis.asyncio import Redis

from artifacts.base_model import BaseModel
from artifacts.hash_model import is_hash_spec
from broker.connection import REDIS_DOWN
from broker.keys import Keys
from broker.liveness import Liveness
from broker.messages import WorkerPhase, WorkerState
from broker.queue import JobQueue
from rpc.server import unless_stopped
from worker.engine_api import EngineConfig
from worker.io.adapters.fetch import AdapterFetcher
from worker.io.adapters.operator_commands import OperatorCommands
from worker.io.engine_client.process import EngineLostError, EngineProcess
from worker.io.engine_client.stall import watch_steps
from worker.io.jobs.drain import drain
from worker.io.jobs.intake import Intake
from worker.io.jobs.telemetry import JobTelemetry
from worker.io.membership.health import WorkerHealth
from worker.io.membership.presence import Presence
from worker.io.membership.registration import wait_until_registered
from worker.io.membership.state import worker_state
from worker.io.relay.links import RouterLinks
from worker.io.settings import Settings
from worker.ipc import Begun, Configure, PinRefused, Ready, Refused, Stepped

log = logging.getLogger(__name__)

# So long the routers have to take what is handed over when the engine is gone, and the last messages of a drain.
FLUSH_S = 1.0
# So long Redis may keep a worker that stops from stopping.
LEAVE_S = 1.0
# Between two messages to a router, where they take cores that the engine computes on.
PACE_S = 0.010


class EngineSession:
    """One life of the engine."""

    def __init__(
        self,
        settings: Settings,
        base: BaseModel,
        redis: Redis,
        fetcher: AdapterFetcher,
        health: WorkerHealth,
        telemetry: JobTelemetry,
    ) -> None:
        keys = Keys(base.name, settings.cell)
        self._settings = settings
        self._base = base
        self._fetcher = fetcher
        self._health = health
        self._telemetry = telemetry
        self._worker_id = telemetry.worker_id
        self._queue = JobQueue(redis, keys, worker_id=self._worker_id)
        self._liveness = Liveness(redis, keys)
        self._id = secrets.token_hex(8)
        self.served = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until told to stop. Raises EngineLostError or EngineUnusableError."""
        engine = await EngineProcess.start(_configure(self._settings))
        try:
            ready = await unless_stopped(stop, self._prepare(engine))
            if ready is not None:
                await self._serve(engine, ready, stop)
        finally:
            await engine.stop()

    async def _prepare(self, engine: EngineProcess) -> Ready:
        """The engine loads its model while we wait for its registration."""
        registering = asyncio.create_task(wait_until_registered(self._fetcher.store, self._base))
        loading = asyncio.create_task(engine.ready())
        try:
            done, _ = await asyncio.wait({registering, loading}, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()  # raises what made it fail
            return loading.result()
        finally:
            registering.cancel()
            loading.cancel()

    async def _serve(self, engine: EngineProcess, ready: Ready, stop: asyncio.Event) -> None:
        settings = self._settings
        intake = Intake(self._base.digest, engine, self._queue, self._fetcher, self._telemetry)
        metrics = self._telemetry.metrics
        relay = RouterLinks(self._worker_id, self._id, intake.held, intake, pace_s=_pace_s(settings), metrics=metrics)
        intake.use(relay, ready)
        metrics.follow(intake)
        orders = OperatorCommands(self._queue, engine, self._fetcher, ready.limits.max_rank)

        def state(phase: WorkerPhase) -> WorkerState:
            return worker_state(self._worker_id, self._id, phase, self._base, engine.pid, intake, self._fetcher.stats)

        presence = Presence(self._id, self._liveness, self._health, state, intake.usage.report)
        listening = asyncio.create_task(_listen(engine, intake, orders))
        watching = asyncio.create_task(watch_steps(engine, presence, intake, settings.stall_s, settings.replace_s))
        claiming: asyncio.Task[None] | None = None
        others: list[asyncio.Task[None]] = []
        try:
            await presence.serve()
            claiming = asyncio.create_task(intake.claims.run())
            others.append(asyncio.create_task(presence.beat()))
            others.append(asyncio.create_task(orders.obey(self._id, stop)))
            self.served = True
            print(f"ready worker={self._worker_id}{metrics.ready_word} health={self._health.address}", flush=True)
            stopping = asyncio.create_task(_wait(stop))
            others.append(stopping)
            await _first({listening, watching, claiming, *others})
            log.info("stops: %d jobs here", len(intake.held.all()))
            await presence.drain()
            await self._stop_claiming(claiming, intake)
            draining = asyncio.create_task(drain(intake, settings.drain_s))
            others.append(draining)
            await _first({draining, listening, watching})  # without the engine nothing goes on here
        except EngineLostError:
            await _cancel(*others, *([claiming] if claiming else []))
            await self._give_up(intake, presence)
            raise
        finally:
            await _cancel(listening, watching, *others, *([claiming] if claiming else []))
            await intake.close()
            await orders.close()
            await asyncio.gather(relay.close(FLUSH_S if stop.is_set() else 0.0), presence.leave())

    async def _give_up(self, intake: Intake, presence: Presence) -> None:
        """The engine is gone: all goes on elsewhere, at once."""
        await presence.withdraw()
        intake.engine_lost()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await intake.claims.settle()
                await intake.empties_within(FLUSH_S)

    async def _stop_claiming(self, claiming: asyncio.Task[None], intake: Intake) -> None:
        """What is claimed at this moment comes in still; nobody is to wait for us afterwards."""
        await _cancel(claiming)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await intake.claims.settle()
                try:
                    await self._queue.withdraw()
                except REDIS_DOWN as error:
                    log.warning("Redis does not answer: %s", error)


async def _listen(engine: EngineProcess, intake: Intake, orders: OperatorCommands) -> None:
    async for message in engine.messages():
        match message:
            case Stepped():
                intake.stepped(message)
                orders.resident(message.stats.adapters)
            case Begun():
                intake.begun(message)
            case Refused():
                intake.refused(message)
            case PinRefused():
                orders.refused(message)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _first(tasks: set[asyncio.Task[None]]) -> None:
    """Return when one of them has ended; raises what ended it."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _pace_s(settings: Settings) -> float:
    """The hash model computes nothing, and a CUDA device leaves the cores to us."""
    return PACE_S if settings.device == "cpu" and not is_hash_spec(settings.model) else 0.0


def _configure(settings: Settings) -> Configure:
    return Configure(EngineConfig(**{field.name: getattr(settings, field.name) for field in fields(EngineConfig)}))
