"""The state that a worker reports with every beat."""

from __future__ import annotations

import os
import socket

from artifacts.base_model import BaseModel
from broker.worker_state import AdapterTiers, WorkerPhase, WorkerState
from worker.engine_api import EngineLimits, EngineStats
from worker.io.metrics import FetchStats


def worker_state(
    worker_id: str,
    incarnation: str,
    phase: WorkerPhase,
    base: BaseModel,
    engine_pid: int,
    limits: EngineLimits,
    stats: EngineStats,
    disk: FetchStats,
) -> WorkerState:
    """Build the state of an incarnation now."""
    return WorkerState(
        worker_id=worker_id,
        incarnation=incarnation,
        phase=phase,
        model=base.name,
        base_digest=base.digest,
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
        max_tokens=min(limits.max_tokens, base.context_length),
        steps=stats.steps,
        host=socket.gethostname(),
        pid=os.getpid(),
        engine_pid=engine_pid,
        tiers=_tiers(stats, disk),
        keeps_links=True,
        constrains=True,
        encodes=True,
    )


def _tiers(engine: EngineStats, disk: FetchStats) -> AdapterTiers:
    return AdapterTiers(
        fetching=disk.fetching,
        loading=engine.tiers.loading,
        hits=engine.adapter_hits,
        misses=engine.adapter_misses,
        swaps=engine.tiers.swaps,
        device_bytes=engine.tiers.device_bytes,
        host_bytes=engine.tiers.host_bytes,
        disk_bytes=disk.bytes,
        disk_bytes_limit=disk.bytes_limit,
        disk_adapters=disk.adapters,
        disk_hits=disk.hits,
        disk_misses=disk.misses,
    )
