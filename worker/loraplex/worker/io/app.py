"""The I/O process: starts an engine process, runs a session for it, and starts another engine when that one dies.

Jobs that the engine had when it died are given back, so that their routers dispatch them again, from the last token.
Should this process die as well, its links to the routers break, and the routers do the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from redis.asyncio import Redis

from loraplex.contracts.artifacts.base_model import BaseModel, read_base_model
from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.liveness import BEAT_MS, Liveness
from loraplex.contracts.broker.messages import WorkerPhase, WorkerState
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.startup import connect_once_up
from loraplex.runtime.rpc.server import Server, stop_signal
from loraplex.runtime.rpc.tasks import every, unless_stopped
from loraplex.runtime.telemetry.metrics import serve_metrics
from loraplex.runtime.telemetry.tracing import set_up_tracing
from loraplex.runtime.tenancy.audit_log import AuditLog
from loraplex.runtime.tenancy.auditor import WINDOW_S, RefusedCallers
from loraplex.worker.engine_api import CaptureFailedError
from loraplex.worker.io.adapters.disk import DiskTier
from loraplex.worker.io.adapters.fetch import PROBE_S, AdapterFetcher, DownloadTimeouts
from loraplex.worker.io.commands import OperatorCommands, TenantData, drop_gone_revisions
from loraplex.worker.io.engine_client import EngineBreaker, EngineLostError, EngineProcess, EngineUnusableError
from loraplex.worker.io.intake import Intake
from loraplex.worker.io.local_jobs import LocalJob, LocalJobs
from loraplex.worker.io.membership import Presence, wait_until_registered, worker_state
from loraplex.worker.io.metrics import WorkerMetrics
from loraplex.worker.io.relay.links import LinkSettings
from loraplex.worker.io.results import REPORT_S, JobTelemetry, Results, TokenReports
from loraplex.worker.io.settings import WorkerSettings
from loraplex.worker.ipc import (
    Begun,
    BlockChanges,
    Configure,
    FollowBlocks,
    Loaded,
    PromptLogprobsPart,
    Ready,
    Refused,
    Stepped,
    TenantForgotten,
)

if TYPE_CHECKING:  # imported only with TLS: cryptography takes long
    from loraplex.worker.io.credentials import WorkerCredentials


log = logging.getLogger(__name__)


# Timeout in seconds for routers to take the jobs of an engine that is gone, and the last messages of a drain.
FLUSH_S = 1.0
# Timeout in seconds for telling Redis that a worker stops.
LEAVE_S = 1.0
# Seconds between two looks at the engine's silence.
LOOK_S = 0.1
# Share of the drain's time, at its end, in which the jobs that are left are given back: a part of them every TURN_S, so
# that the workers that take them over do not all prefill at once.
GIVE_BACK_SHARE = 0.4
# Seconds between two parts.
TURN_S = 0.1


class EngineSession:
    """The life of one engine process. `served`: it was ready, and this worker took jobs for it.

    `former`: the worker's state with the engine before, where that served; `state`: its own, at the last beat.
    `graphs`: its decode steps are CUDA graphs, unless capturing them has failed in this worker.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        base: BaseModel,
        redis: Redis,
        fetcher: AdapterFetcher,
        health: Server,
        telemetry: JobTelemetry,
        breaker: EngineBreaker,
        credentials: WorkerCredentials | None = None,
    ) -> None:
        keys = Keys(base.name, settings.cell)
        self._settings = settings
        self._base = base
        self._fetcher = fetcher
        self._health = health
        self._telemetry = telemetry
        self._breaker = breaker
        self._worker_id = telemetry.worker_id
        self._queue = JobQueue(redis, keys, worker_id=self._worker_id, seals=credentials.seals if credentials else None)
        self._liveness = Liveness(redis, keys)
        self._link_credentials, incarnation = credentials.link if credentials else None, secrets.token_hex(8)
        self._incarnation = credentials.link.named(incarnation) if credentials else incarnation
        self.served = False
        self.former: WorkerState | None = None
        self.state: WorkerState | None = None
        self.graphs = True

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until told to stop. Raises EngineLostError, EngineUnusableError or CaptureFailedError."""
        engine = await EngineProcess.start(Configure(replace(self._settings.engine_config(), graphs=self.graphs)))
        try:
            ready = await unless_stopped(stop, self._prepare(engine))
            if ready is not None:
                await self._serve(engine, ready, stop)
        finally:
            await engine.stop()

    async def _prepare(self, engine: EngineProcess) -> Ready:
        """Wait until the engine has loaded its model, and the store knows this model."""
        registering = asyncio.create_task(wait_until_registered(self._fetcher.store, self._base))
        loading = asyncio.create_task(engine.ready())
        returning = asyncio.create_task(self._announce_return())
        try:
            done, _ = await asyncio.wait({registering, loading}, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()  # raises its error
            await drop_gone_revisions(self._fetcher)
            return loading.result()
        finally:
            registering.cancel()
            loading.cancel()
            returning.cancel()

    async def _announce_return(self) -> None:
        """Beat while the engine starts, however slowly, in place of one that served: jobs of its size wait for it."""
        if self.former is not None:
            state = replace(self.former, incarnation=self._incarnation, phase=WorkerPhase.FAILING, returns=True)
            idle = replace(state, rows_running=0, rows_waiting=0, blocks_referenced=0, slots_pinned=0, adapters=())
            await every(BEAT_MS / 1e3, lambda: self._liveness.beat(idle), passing=REDIS_DOWN)

    async def _serve(self, engine: EngineProcess, ready: Ready, stop: asyncio.Event) -> None:
        settings, metrics, jobs = self._settings, self._telemetry.metrics, LocalJobs()
        usage = TokenReports(jobs, self._queue)
        link_settings = LinkSettings(
            self._worker_id, self._incarnation, base_digest=self._base.digest, credentials=self._link_credentials
        )
        results = Results(jobs, engine, ready, usage, self._telemetry, link_settings, self._breaker)
        intake = Intake(self._base.digest, self._queue, engine, self._fetcher, results, usage, metrics)
        commands = OperatorCommands(self._queue, engine, self._fetcher, ready.limits.max_rank)
        tenant_data = TenantData(self._fetcher, engine, results, commands, usage)
        results.links.forget_tenant = tenant_data.forget
        results.links.followers.follow_engine = lambda on: engine.send(FollowBlocks(on))
        presence = self._presence(engine, results)
        intake.on_pause = presence.pause
        metrics.follow(lambda: (results.stats, results.limits, self._fetcher.stats))
        listening = asyncio.create_task(_listen(engine, results, commands, tenant_data))
        watching = asyncio.create_task(
            watch_steps(engine, presence, results, intake, settings.stall_s, settings.replace_s)
        )
        claiming: asyncio.Task[None] | None = None
        others: list[asyncio.Task[None]] = []
        try:
            if self._breaker.deaths:
                proving = [asyncio.create_task(self._prove(results, presence)), asyncio.create_task(_wait(stop))]
                others += proving
                await _first_ended({listening, watching, *proving})
                if stop.is_set():
                    return
                others.clear()
                await _cancel(*proving)
            await presence.announce()
            claiming = asyncio.create_task(intake.run())
            others += [asyncio.create_task(one) for one in (presence.beat(), every(PROBE_S, self._fetcher.probe))]
            others.append(asyncio.create_task(every(REPORT_S, usage.report, passing=REDIS_DOWN)))
            others.append(asyncio.create_task(every(link_settings.beat_s, results.links.keep_alive)))
            others.append(asyncio.create_task(commands.run(self._incarnation, stop)))
            self.served = True
            print(f"ready worker={self._worker_id}{metrics.ready_word}", flush=True)
            others.append(asyncio.create_task(_wait(stop)))
            await _first_ended({listening, watching, claiming, *others})
            log.info("stops: %d jobs here", len(jobs.all()))
            await presence.announce_draining()
            await self._stop_claiming(claiming, intake)
            draining = asyncio.create_task(drain(results, settings.drain_s))
            others.append(draining)
            await _first_ended({draining, listening, watching})  # without the engine nothing goes on here
        except EngineLostError:
            # The watch too: it would put a worker that is out of service back, whose engine was not silent for long.
            await _cancel(watching, *others, *([claiming] if claiming else []))
            await self._give_up(intake, results, presence)
            raise
        finally:
            await _cancel(listening, watching, *others, *([claiming] if claiming else []))
            await intake.close()
            await commands.close()
            await asyncio.gather(results.close(FLUSH_S if stop.is_set() else 0.0), presence.leave())

    async def _prove(self, results: Results, presence: Presence) -> None:
        """Wait for a pause, and for a step of the engine that no job needs: engines before this one died."""
        breaker = self._breaker
        if not breaker.is_open:
            await asyncio.sleep(breaker.pause_s)
            await results.warm_up(generates=self._base.serves("generate"))
            return
        message = "%d engines died without a step between them: this worker claims nothing and tries again in %.0f s"
        log.error(message, breaker.deaths, breaker.pause_s)
        await presence.pause(True)
        beating = asyncio.create_task(presence.beat())
        try:
            await asyncio.sleep(breaker.pause_s)
            await results.warm_up(generates=self._base.serves("generate"))
            log.warning("the engine steps; this worker serves again")
        finally:
            await _cancel(beating)

    def _presence(self, engine: EngineProcess, results: Results) -> Presence:
        def state(phase: WorkerPhase) -> WorkerState:
            identity = (self._worker_id, self._incarnation, phase, self._base, engine.pid)
            stats = results.stats
            now = worker_state(*identity, results.limits, stats, self._fetcher.stats)
            self.state = replace(now, sets=self._fetcher.sets.among(stats.adapters), fetch_fails=self._fetcher.fails)
            return self.state

        def follow(routers: Sequence[str]) -> None:
            results.links.follow(routers)
            self._telemetry.metrics.readiness.note_routers(routers, self._base.name, self._settings.cell)

        return Presence(self._incarnation, self._liveness, self._health, state, follow)

    async def _give_up(self, intake: Intake, results: Results, presence: Presence) -> None:
        """Give every job back at once: the engine is gone."""
        await presence.suspend()
        presence.withdraw()
        results.accepting = False
        await intake.end_wait()  # or it would take back what is given back
        results.engine_lost()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await intake.finish_claim()
                await results.jobs.empties_within(FLUSH_S)

    async def _stop_claiming(self, claiming: asyncio.Task[None], intake: Intake) -> None:
        """End the claims; takes in what is being claimed, and takes the worker's free rows out of the queue."""
        await _cancel(claiming)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await intake.finish_claim()
                try:
                    await self._queue.stop_claiming()
                except REDIS_DOWN as error:
                    log.warning("Redis does not answer: %s", error)


async def _listen(engine: EngineProcess, results: Results, commands: OperatorCommands, tenant_data: TenantData) -> None:
    async for message in engine.messages():
        match message:
            case Stepped():
                results.stepped(message)
            case Begun():
                results.begun(message)
            case PromptLogprobsPart():
                results.prompt_read(message)
            case Refused():
                results.refused(message)
            case Loaded():
                commands.loaded(message)
            case TenantForgotten():
                tenant_data.answered(message)
            case BlockChanges():
                results.links.followers.changed(message)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _first_ended(tasks: set[asyncio.Task[None]]) -> None:
    """Return when one of the tasks has ended; raises its error."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def watch_steps(
    engine: EngineProcess,
    presence: Presence,
    results: Results,
    intake: Intake,
    stall_s: float,
    replace_s: float,
) -> None:
    """Watch the engine; never returns. Raises EngineLostError when it has ended the engine.

    After `stall_s` seconds of silence the worker claims nothing; where other workers live, it goes out of service and
    gives back the jobs that they take. After `replace_s` the engine is ended. A live engine reports every step, which
    takes at most a third of `stall_s` (chunk_sizer.py), and idle beats; time without a processor does not count. One
    that compiles a kernel or runs a suspect, which another blame would end, has until `replace_s`.
    """
    looked_at = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        now = time.monotonic()
        if now - looked_at > 5 * LOOK_S:  # this process stood still: messages of the meantime are still unread
            engine.expect()
        looked_at = now
        silent_s = engine.silent_s()
        patience_s = replace_s if results.runs_suspect or engine.compiling else stall_s
        if silent_s > replace_s:
            log.error("the engine has not stepped for %.1f s; ending it", silent_s)
            engine.kill()
            raise EngineLostError("the engine was ended")
        if silent_s > patience_s and not presence.withdrawn:
            if not engine.stalled:
                log.error("the engine has not stepped for %.1f s; this worker claims nothing", silent_s)
                engine.stalled = True
                await presence.suspend()
                await intake.end_wait()
            if peers := await presence.peers():
                log.error("the jobs of the engine go on at the %d other workers", len(peers))
                # First, so that no job that is given back comes to this worker again.
                presence.withdraw()
                results.give_all_back(peers)
        elif silent_s <= patience_s and engine.stalled:
            log.warning("the engine steps again")
            engine.stalled = False
            await presence.restore()


async def drain(results: Results, drain_s: float) -> None:
    """Wait for the jobs that run, then give the others back, those with the most tokens to go first.

    Returns when the routers have all of them, or after `drain_s`.
    """
    give_back_s = GIVE_BACK_SHARE * drain_s
    if await results.jobs.empties_within(drain_s - give_back_s):
        return
    for turns_left in range(max(1, round(give_back_s / TURN_S)), 0, -1):
        running = sorted((local for local in results.jobs.all() if local.running), key=_tokens_to_go, reverse=True)
        for local in running[: math.ceil(len(running) / turns_left)]:
            results.give_back(local)
        if await results.jobs.empties_within(TURN_S):
            return


def _tokens_to_go(local: LocalJob) -> int:
    """Return the most tokens that a job may still make."""
    stopping = local.job.stopping
    return sum(stopping.max_tokens - choice.start - len(choice.ids) for choice in local.running)


# Seconds until another engine is started, first and at most: the pause doubles while engines die before they serve.
RESTART_S = 0.1
RESTART_LIMIT_S = 10.0
# Number of engines that may die one after the other before the first one has served; then the worker ends, since the
# next would die as well.
START_DEATHS_LIMIT = 3


async def run(settings: WorkerSettings) -> None:
    """Work until SIGTERM or SIGINT; the second one ends the process at once.

    Raises ArtifactError, PortInUse, MetricsPortError, RedisUnreachableError or EngineUnusableError.
    """
    stop = stop_signal()
    chosen = settings.quantize, settings.kv_cache_dtype
    base = await asyncio.to_thread(read_base_model, settings.model, settings.model_name, *chosen)
    worker_id = settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"
    metrics = WorkerMetrics()
    audit = AuditLog(settings.audit, "worker", metrics.audit)
    refusals = RefusedCallers(audit)
    credentials = _credentials(settings, metrics, refusals)
    if credentials is not None:
        worker_id = credentials.link.named(worker_id)
    spans = set_up_tracing("worker", os.environ)
    telemetry = JobTelemetry(metrics, spans, worker_id)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(audit.close)
        stack.callback(refusals.flush)
        flushing = asyncio.create_task(every(WINDOW_S, refusals.flush))
        stack.callback(flushing.cancel)
        stack.push_async_callback(asyncio.to_thread, spans.close)
        metrics_server = serve_metrics(metrics, settings.health_host, settings.metrics_port)
        if metrics_server is not None:
            stack.callback(metrics_server.close)
        health = Server()
        health.on_serving = metrics.readiness.set_serving
        address = f"{settings.health_host}:{health.bind(settings.health_host, settings.health_port)}"
        await health.start()
        stack.push_async_callback(health.stop, 0)
        metrics.ready_word += f" health={address}"
        log.info("health at %s", address)
        redis = await unless_stopped(stop, connect_once_up(settings.redis_url))
        if redis is None:
            return
        stack.push_async_callback(redis.aclose)
        disk = await asyncio.to_thread(_open_disk, settings)
        stack.push_async_callback(disk.close)
        timeouts = DownloadTimeouts(settings.fetch_s, settings.fetch_silent_s)
        tls = credentials.link.tls if credentials else None
        fetcher = AdapterFetcher(settings.store, disk, timeouts, metrics, tls=tls)
        stack.push_async_callback(fetcher.close)
        breaker = EngineBreaker()
        await run_sessions(
            lambda: EngineSession(settings, base, redis, fetcher, health, telemetry, breaker, credentials),
            *(stop, metrics),
        )


async def run_sessions(
    new_session: Callable[[], EngineSession],
    stop: asyncio.Event,
    metrics: WorkerMetrics,
    *,
    restart_s: float = RESTART_S,
) -> None:
    """Run one engine session after the other until told to stop.

    Raises EngineUnusableError, also where START_DEATHS_LIMIT engines died and none has served.
    """
    pause_s, ever_served, start_deaths, former, graphs = restart_s, False, 0, None, True
    while not stop.is_set():
        session = new_session()
        session.former, session.graphs = former, graphs
        try:
            await session.run(stop)
        except CaptureFailedError as error:
            log.warning("%s; engines start without graphs from now on", error)
            graphs = False
        except EngineLostError as error:
            metrics.engines_lost.inc()
            log.error("%s; %s", error, "stopping" if stop.is_set() else "starting another")
            ever_served = ever_served or session.served
            former = session.state if session.served else None
            start_deaths += 1
            if not ever_served and start_deaths >= START_DEATHS_LIMIT:
                raise EngineUnusableError(
                    f"{error} before it served, as the {start_deaths - 1} engines before it; "
                    "see their messages in the worker's log (`loraplex up --data-dir DIR` keeps it)"
                ) from error
            pause_s = restart_s if session.served else min(RESTART_LIMIT_S, pause_s * 2)
            await unless_stopped(stop, asyncio.sleep(pause_s))


def _credentials(
    settings: WorkerSettings, metrics: WorkerMetrics, refusals: RefusedCallers
) -> WorkerCredentials | None:
    if (tls := settings.tls_files()) is None:
        return None
    from loraplex.runtime.tenancy.certificates import end_of
    from loraplex.worker.io.credentials import credentials_of

    metrics.certificate_end.set_function(lambda: end_of(tls.content.cert, tls.content.ca))
    return credentials_of(tls, settings.job_key, metrics, refusals)


def _open_disk(settings: WorkerSettings) -> DiskTier:
    if settings.cache_dir:
        return DiskTier.open(Path(settings.cache_dir), settings.disk_adapter_bytes)
    temporary = tempfile.mkdtemp(prefix="loraplex-adapters-")
    return DiskTier.open(Path(temporary), settings.disk_adapter_bytes, temporary=True)
