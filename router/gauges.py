"""Refreshes the gauges: requests that wait and run, and live workers."""

from __future__ import annotations

import asyncio
from collections import Counter

from broker.connection import REDIS_DOWN
from broker.messages import WorkerPhase
from router.catalog.models import Models
from router.dispatch.dispatcher import Dispatcher
from router.metrics import RouterMetrics

# Interval in seconds between refreshes.
REFRESH_S = 1.0


async def follow_gauges(metrics: RouterMetrics, models: Models, dispatcher: Dispatcher) -> None:
    """Refresh the gauges every second; never returns."""
    while True:
        jobs = tuple(dispatcher.jobs)
        running = sum(routed.link is not None for routed in jobs)
        metrics.open_requests.labels("running").set(running)
        metrics.open_requests.labels("queued").set(len(jobs) - running)
        for model in models.served:
            name = model.manifest.name
            phases = Counter(state.phase for state in models.workers(name))
            for phase in WorkerPhase:
                metrics.workers.labels(name, phase.value).set(phases[phase])
            try:
                metrics.waiting.labels(name).set(await model.queue.count_waiting())
            except REDIS_DOWN:
                continue  # keep the last count; other metrics show the outage
        await asyncio.sleep(REFRESH_S)
