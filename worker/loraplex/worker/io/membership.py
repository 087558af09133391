"""The worker as the cluster sees it: its base model's registration, its liveness key in Redis, its state and health.

Beats overlap: however slow Redis is, the key is written every BEAT_MS, as long as an answer comes within the key's time
to live. So a beat that was sent before the key's removal may arrive after it; the removal is repeated with every beat.
A Redis that hangs delays neither the health nor the callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import grpc
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc

from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.liveness import BEAT_MS, Liveness
from loraplex.contracts.broker.messages import AdapterTiers, WorkerPhase, WorkerState
from loraplex.contracts.broker.terms import WORKER_TTL_MS
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.telemetry.logging import LogOnce
from loraplex.worker.engine_api import EngineLimits, EngineStats

log = logging.getLogger(__name__)


# Seconds between two questions to the store.
ASK_S = 0.25
# Timeout in seconds of one question.
CALL_S = 5.0


async def wait_until_registered(store: adapters_pb2_grpc.AdapterServiceAsyncStub, base: BaseModel) -> None:
    """Return once the store has this revision of the model, be it live or not; says what it waits for."""
    once = LogOnce(log, logging.WARNING)
    while True:
        try:
            live = (await store.GetBaseModel(pb.GetBaseModelRequest(name=base.name), timeout=CALL_S)).model
            if live.digest == base.digest or await _has_revision(store, base):
                return
            waits_for = f"base model {base.name}: {_what_differs(live, base)}"
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                waits_for = f"base model {base.name} to be registered (loraplex models push)"
            else:
                waits_for = f"the adapter store ({error.code().name})"
        once(f"waits for {waits_for}")
        await asyncio.sleep(ASK_S)


async def _has_revision(store: adapters_pb2_grpc.AdapterServiceAsyncStub, base: BaseModel) -> bool:
    named = pb.GetBaseModelRequest(name=f"{base.name}@{base.digest}")
    try:
        other = (await store.GetBaseModel(named, timeout=CALL_S)).model
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        return False
    log.info("serves %s, a %s revision of base model %s", base.digest, other.state, base.name)
    return True


def _what_differs(registered: pb.BaseModel, base: BaseModel) -> str:
    pairs = (
        ("--quantize", registered.quantization, base.quantization),
        ("--kv-cache-dtype", registered.kv_cache_dtype, base.kv_cache_dtype),
    )
    different = [pair for pair in pairs if pair[1] != pair[2]]
    if different and (registered.original_digest or registered.digest) == base.adapted_digest:
        theirs, ours = (" and ".join(_flag(pair[0], pair[side]) for pair in different) for side in (1, 2))
        return f"it is registered {theirs}, this worker runs {ours}; give both the same"
    return (
        f"the store has {registered.digest} under this name, this worker's files are {base.digest}; "
        "serve the registered files, stage these beside them (loraplex models push --stage), or register these under "
        "another name"
    )


def _flag(flag: str, value: str) -> str:
    return f"with {flag} {value}" if value else f"without {flag}"


# Fields of a worker's state that are its engine's, under the same names.
_AS_IN_STATS = {one.name for one in fields(EngineStats)} & {one.name for one in fields(WorkerState)} - {"tiers"}


def worker_state(
    worker_id: str,
    incarnation: str,
    phase: WorkerPhase,
    base: BaseModel,
    engine_pid: int,
    limits: EngineLimits,
    stats: EngineStats,
    disk: AdapterTiers,
) -> WorkerState:
    """Build the state of an incarnation now; `disk` has the counts of the adapters on disk."""
    return WorkerState(
        worker_id=worker_id,
        incarnation=incarnation,
        phase=phase,
        model=base.name,
        base_digest=base.digest,
        **{name: getattr(stats, name) for name in _AS_IN_STATS},
        rows_limit=limits.rows,
        blocks_total=limits.blocks,
        slots_total=limits.adapter_slots,
        max_rank=limits.max_rank,
        max_tokens=min(limits.max_tokens, base.context_length),
        host=socket.gethostname(),
        pid=os.getpid(),
        engine_pid=engine_pid,
        tiers=replace(
            disk,
            loading=stats.tiers.loading,
            hits=stats.adapter_hits,
            misses=stats.adapter_misses,
            swaps=stats.tiers.swaps,
            device_bytes=stats.tiers.device_bytes,
            host_bytes=stats.tiers.host_bytes,
        ),
    )


# Timeout in seconds for one beat: without a later one the key has expired by then.
BEAT_TIMEOUT_S = WORKER_TTL_MS / 1e3
# Timeout in seconds for asking Redis who else lives: a stall is to be known within 2 s.
PEERS_S = 0.5
# Timeout in seconds for removing the key of a worker that stops. It expires on its own as well.
LEAVE_S = 1.0


class Presence:
    """The presence of one incarnation. Each beat writes what `state` returns for the phase, and calls `follow_routers`
    with the relay addresses of the live routers.
    """

    def __init__(
        self,
        incarnation: str,
        liveness: Liveness,
        health: Server,
        state: Callable[[WorkerPhase], WorkerState],
        follow_routers: Callable[[Sequence[str]], None],
    ) -> None:
        self._incarnation = incarnation
        self._liveness = liveness
        self._health = health
        self._state = state
        self._follow_routers = follow_routers
        self._phase = WorkerPhase.SERVING
        self._changed = asyncio.Event()
        # True while the key is removed although this process lives.
        self.withdrawn = False

    async def announce(self) -> None:
        """Write the key, then turn the health to SERVING: only a live worker may claim."""
        self._phase = WorkerPhase.SERVING
        await self._write()
        await self._health.set_serving(True)

    async def beat(self) -> None:
        """Write the key every BEAT_MS, and at every change; never returns."""
        async with asyncio.TaskGroup() as writes:
            while True:
                # Not wait_for: in Python 3.11 that loses a cancellation which comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_MS / 1e3):
                        await self._changed.wait()
                self._changed.clear()
                writes.create_task(self._write())

    async def suspend(self) -> None:
        """Turn the health to NOT_SERVING: the engine does not step."""
        await self._health.set_serving(False)

    def withdraw(self) -> None:
        """Remove the key: jobs go to other workers."""
        self.withdrawn = True
        self._changed.set()

    async def peers(self) -> list[WorkerState]:
        """Return the other live workers that take jobs of this one's model; none where Redis does not answer."""
        try:
            async with asyncio.timeout(PEERS_S):
                others = await self._liveness.other_workers(self._incarnation)
        except REDIS_DOWN:  # a timeout is one of them
            return []
        digest = self._state(self._phase).base_digest
        return [other for other in others if other.phase is WorkerPhase.SERVING and other.base_digest == digest]

    async def restore(self) -> None:
        """Write the key again if it was removed, with the health that goes with the phase: the engine steps again."""
        self.withdrawn = False
        self._changed.set()
        if self._phase is WorkerPhase.SERVING:
            await self._health.set_serving(True)

    async def pause(self, begins: bool) -> None:
        """Announce a pause of claims, or its end; jobs go on, and a draining worker keeps draining."""
        if self._phase is WorkerPhase.DRAINING:
            return
        self._phase = WorkerPhase.FAILING if begins else WorkerPhase.SERVING
        self._changed.set()
        await self._health.set_serving(not begins and not self.withdrawn)

    async def announce_draining(self) -> None:
        """Announce that the worker takes no more jobs, though those that it has go on."""
        self._phase = WorkerPhase.DRAINING
        self._changed.set()
        await self._health.set_serving(False)

    async def leave(self) -> None:
        """Remove the key for good, and turn the health to NOT_SERVING; call it when `beat` has ended."""
        self.withdrawn = True
        await self._health.set_serving(False)
        await self._write(LEAVE_S)

    async def _write(self, timeout_s: float = BEAT_TIMEOUT_S) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                if self.withdrawn:
                    await self._liveness.declare_dead(self._incarnation)
                    return
                self._follow_routers(await self._liveness.beat(self._state(self._phase)))
        except REDIS_DOWN as error:  # a timeout is one of them
            log.warning("Redis does not answer: %s", str(error) or type(error).__name__)
