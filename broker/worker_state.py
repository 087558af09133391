"""Dataclasses of the state that a live worker reports; broker/liveness.py stores it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class AdapterTiers:
    """Counts of a worker's adapters on the device, in host memory and on disk, since its start; bytes as stored."""

    # Adapters on the way from the store to the disk, and from the disk to the device.
    fetching: int = 0
    loading: int = 0
    # Requests that found their adapter on the device, and that did not.
    hits: int = 0
    misses: int = 0
    # Loads that evicted another adapter from its slot.
    swaps: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_bytes_limit: int = 0
    disk_adapters: int = 0
    # Requests that found their adapter on the disk, and that did not.
    disk_hits: int = 0
    disk_misses: int = 0


class WorkerPhase(StrEnum):
    """The phase of a live worker: only a serving one claims jobs."""

    SERVING = "serving"
    DRAINING = "draining"
    # Its engines died one after the other.
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state that a live worker reports with every beat."""

    worker_id: str
    incarnation: str
    phase: WorkerPhase
    model: str
    base_digest: str
    rows_running: int
    rows_waiting: int
    rows_limit: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_referenced: int
    slots_total: int
    slots_used: int
    slots_pinned: int
    adapters: tuple[str, ...]
    max_rank: int
    max_tokens: int
    steps: int
    host: str
    pid: int
    engine_pid: int
    tiers: AdapterTiers = AdapterTiers()
