"""Refreshes the gauges: requests that wait and run, and live workers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from artifacts.names import parse_revision_name
from broker.connection import REDIS_DOWN
from broker.worker_state import WorkerPhase, WorkerState
from router.catalog.models import Models
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.routed_job import RoutedJob
from router.metrics import RouterMetrics

# Interval in seconds between refreshes.
REFRESH_S = 1.0
# Maximum number of adapters that a label names: it is sent with each scrape.
ADAPTERS_NAMED = 1_000


async def follow_gauges(metrics: RouterMetrics, models: Models, dispatcher: Dispatcher) -> None:
    """Refresh the gauges every second; never returns."""
    while True:
        count_jobs(metrics, tuple(dispatcher.jobs), _slots(models))
        for model in models.served:
            name = model.manifest.name
            count_workers(metrics, name, models.workers(name))
            try:
                metrics.waiting.labels(name).set(await model.queue.count_waiting())
            except REDIS_DOWN:
                continue  # keep the last count; other metrics show the outage
        await asyncio.sleep(REFRESH_S)


def count_jobs(metrics: RouterMetrics, jobs: Sequence[RoutedJob], slots: int) -> None:
    """Set the gauges of this router's jobs and their adapters; `slots` is the number of all workers' adapter slots."""
    running = [routed for routed in jobs if routed.link is not None]
    queued = [routed for routed in jobs if routed.link is None]
    metrics.open_requests.labels("running").set(len(running))
    metrics.open_requests.labels("queued").set(len(queued))
    metrics.lora_requests.clear()
    metrics.lora_requests.labels(slots, _adapters(running), _adapters(queued)).set(time.time())


def count_workers(metrics: RouterMetrics, model: str, workers: Sequence[WorkerState]) -> None:
    """Set the gauges of a model's live workers."""
    phases = Counter(state.phase for state in workers)
    for phase in WorkerPhase:
        metrics.workers.labels(model, phase.value).set(phases[phase])
    blocks = sum(state.blocks_total for state in workers)
    used = sum(state.blocks_referenced for state in workers)
    metrics.kv_usage.labels(model).set(used / blocks if blocks else 0.0)


def _slots(models: Models) -> int:
    return sum(state.slots_total for model in models.served for state in models.workers(model.manifest.name))


def _adapters(jobs: Sequence[RoutedJob]) -> str:
    """Return the full names of the jobs' adapters, with commas; weighted sets have none."""
    revisions = {routed.job.adapter.revision for routed in jobs if routed.job.adapter and not routed.job.adapter.parts}
    return ",".join(sorted({str(parse_revision_name(name).adapter_name) for name in revisions})[:ADAPTERS_NAMED])
