"""The I/O process: starts the engine, says that it lives, claims, relays, and starts over when the engine dies.

An incarnation is one life of the engine. What it held is not recovered here: its links to the routers break, and they
dispatch its jobs again, from the last token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import tempfile
from pathlib import Path

from redis.asyncio import Redis

from artifacts.base_model import BaseModel, read_base_model
from artifacts.hash_model import is_hash_spec
from broker.connection import REDIS_DOWN, connect
from broker.keys import Keys
from broker.liveness import BEAT_MS, Liveness
from broker.messages import AdapterTiers, WorkerPhase, WorkerState
from broker.queue import JobQueue
from rpc.server import stop_signal
from worker.adapter_disk import DiskTier
from worker.adapter_download import Patience
from worker.adapter_fetch import AdapterFetcher, FetchStats
from worker.intake import Intake
from worker.link import Configure, Ready, Refused, Stepped
from worker.registration import wait_until_registered
from worker.relay_client import RelayClients
from worker.scheduling.contract import EngineStats
from worker.settings import Settings
from worker.supervisor import EngineLostError, EngineProcess

log = logging.getLogger(__name__)

# An engine that dies again and again is started ever more slowly.
RESTART_S = 0.1
RESTART_MOST_S = 10.0
FLUSH_S = 1.0
# Between two messages to a router, where they take cores that the engine computes on.
PACE_S = 0.010


async def run(settings: Settings) -> None:
    """Work until SIGTERM or SIGINT. Raises ArtifactError, RedisUnreachableError or EngineUnusableError."""
    stop = stop_signal()
    base = await asyncio.to_thread(read_base_model, settings.model, settings.model_name)
    redis = await connect(settings.redis_url)
    disk = await asyncio.to_thread(_open_disk, settings)
    fetcher = AdapterFetcher(settings.store, disk, Patience(settings.fetch_s, settings.fetch_silent_s))
    pause_s = RESTART_S
    try:
        while not stop.is_set():
            incarnation = Incarnation(settings, base, redis, fetcher)
            try:
                await incarnation.run(stop)
            except EngineLostError as error:
                log.error("%s; starting another", error)
                pause_s = RESTART_S if incarnation.served else min(RESTART_MOST_S, pause_s * 2)
                await _sleep(stop, pause_s)
    finally:
        await fetcher.close()
        await disk.close()
        await redis.aclose()


class Incarnation:
    """One life of the engine, and everything that depends on it."""

    def __init__(self, settings: Settings, base: BaseModel, redis: Redis, fetcher: AdapterFetcher) -> None:
        keys = Keys(base.name, settings.cell)
        self._settings = settings
        self._base = base
        self._fetcher = fetcher
        self._worker_id = settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"
        self._queue = JobQueue(redis, keys, worker_id=self._worker_id)
        self._liveness = Liveness(redis, keys)
        self._id = secrets.token_hex(8)
        self._phase = WorkerPhase.SERVING
        self.served = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until told to stop. Raises EngineLostError or EngineUnusableError."""
        engine = await EngineProcess.start(_configure(self._settings))
        try:
            ready = await self._prepare(engine, stop)
            if ready is not None:
                await self._serve(engine, ready, stop)
        finally:
            await engine.stop()

    async def _prepare(self, engine: EngineProcess, stop: asyncio.Event) -> Ready | None:
        """The engine loads its model while we wait for its registration; None when told to stop."""
        loading = asyncio.create_task(engine.ready())
        registered = asyncio.create_task(wait_until_registered(self._fetcher.store, self._base))
        stopping = asyncio.create_task(stop.wait())
        tasks = {loading, registered}
        try:
            while tasks and not stop.is_set():
                done, _ = await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
                for task in done & tasks:
                    task.result()  # raises what made it fail
                tasks -= done
            return None if stop.is_set() else loading.result()
        finally:
            for task in (loading, registered, stopping):
                task.cancel()

    async def _serve(self, engine: EngineProcess, ready: Ready, stop: asyncio.Event) -> None:
        intake = Intake(self._base.digest, engine, self._queue, self._fetcher)
        relay = RelayClients(self._worker_id, self._id, intake.held, intake, pace_s=_pace_s(self._settings))
        intake.use(relay, ready)
        listening = asyncio.create_task(self._listen(engine, intake))
        claiming: asyncio.Task[None] | None = None
        beating = asyncio.create_task(self._beat(engine, intake))
        stopping = asyncio.create_task(stop.wait())
        flush_s = 0.0
        try:
            await self._beat_once(engine, intake)  # before the first claim: who owns a job must live
            claiming = asyncio.create_task(intake.claim())
            self.served = True
            print(f"ready worker={self._worker_id}", flush=True)
            tasks = {listening, claiming, beating, stopping}
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task  # raises EngineLostError, or what must not happen
            self._phase = WorkerPhase.DRAINING
            claiming.cancel()
            await asyncio.gather(claiming, return_exceptions=True)
            await self._beat_once(engine, intake)
            await intake.drain(self._settings.drain_s)
            flush_s = FLUSH_S
        finally:
            for task in (listening, beating, stopping, *([claiming] if claiming else [])):
                task.cancel()
            await intake.close()
            await relay.close(flush_s)
            try:
                await self._liveness.remove(self._id)
            except REDIS_DOWN:  # its key dies by itself
                log.warning("Redis did not answer the end of this incarnation")

    async def _listen(self, engine: EngineProcess, intake: Intake) -> None:
        async for message in engine.messages():
            match message:
                case Stepped():
                    intake.stepped(message)
                case Refused():
                    intake.refused(message)

    async def _beat(self, engine: EngineProcess, intake: Intake) -> None:
        """Say that we live, while the engine steps or has nothing to do."""
        while True:
            await asyncio.sleep(BEAT_MS / 1e3)
            in_engine = any(choice.in_engine for choice in intake.held.running)
            if in_engine and engine.silent_s() > self._settings.stall_s:
                log.error("the engine has not stepped for %.1f s; ending it", engine.silent_s())
                engine.kill()
                raise EngineLostError("the engine was ended")
            await self._beat_once(engine, intake)

    async def _beat_once(self, engine: EngineProcess, intake: Intake) -> None:
        limits, stats = intake.limits, intake.stats
        state = WorkerState(
            worker_id=self._worker_id,
            incarnation=self._id,
            phase=self._phase,
            model=self._base.name,
            base_digest=self._base.digest,
            rows_running=stats.rows_running,
            rows_waiting=stats.rows_waiting,
            rows_limit=limits.rows,
            blocks_total=limits.blocks,
            blocks_free=stats.blocks_free,
            blocks_cached=stats.blocks_cached,
            blocks_referenced=stats.blocks_referenced,
            slots_total=limits.adapter_slots,
            slots_used=stats.slots_used,
            slots_pinned=stats.slots_pinned,
            adapters=stats.adapters,
            max_rank=limits.max_rank,
            max_tokens=min(limits.max_tokens, self._base.context_length),
            steps=stats.steps,
            host=socket.gethostname(),
            pid=os.getpid(),
            engine_pid=engine.pid,
            tiers=_tiers(stats, self._fetcher.stats),
        )
        try:
            await self._liveness.beat(state)
            await intake.usage.report()
        except REDIS_DOWN as error:
            log.warning("Redis does not answer: %s", error)


def _open_disk(settings: Settings) -> DiskTier:
    if settings.cache_dir:
        return DiskTier.open(Path(settings.cache_dir), settings.disk_adapter_bytes)
    temporary = tempfile.mkdtemp(prefix="loraplex-adapters-")
    return DiskTier.open(Path(temporary), settings.disk_adapter_bytes, temporary=True)


def _tiers(engine: EngineStats, disk: FetchStats) -> AdapterTiers:
    return AdapterTiers(
        fetching=disk.fetching,
        loading=engine.adapters_loading,
        hits=engine.adapter_hits,
        misses=engine.adapter_misses,
        swaps=engine.adapter_swaps,
        device_bytes=engine.adapter_device_bytes,
        host_bytes=engine.adapter_host_bytes,
        disk_bytes=disk.bytes,
        disk_bytes_limit=disk.bytes_limit,
        disk_adapters=disk.adapters,
        disk_hits=disk.hits,
        disk_misses=disk.misses,
    )


def _pace_s(settings: Settings) -> float:
    """The hash model computes nothing, and a CUDA device leaves the cores to us."""
    return PACE_S if settings.device == "cpu" and not is_hash_spec(settings.model) else 0.0


def _configure(settings: Settings) -> Configure:
    return Configure(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        rows=settings.rows,
        kv_blocks=settings.kv_blocks,
        block_size=settings.block_size,
        adapter_slots=settings.adapter_slots,
        host_adapter_bytes=settings.host_adapter_bytes,
        max_rank=settings.max_rank,
        step_tokens=settings.step_tokens,
        threads=settings.threads,
    )


async def _sleep(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), timeout=seconds)
