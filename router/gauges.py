"""Keeps up the metrics that tell what holds now: what waits and runs, and who lives."""

from __future__ import annotations

import asyncio
from collections import Counter

from broker.connection import REDIS_DOWN
from broker.messages import WorkerPhase
from router.catalog.models import Models
from router.dispatch.dispatcher import Dispatcher
from router.metrics import RouterMetrics

EVERY_S = 1.0


async def follow_gauges(metrics: RouterMetrics, models: Models, dispatcher: Dispatcher) -> None:
    """Forever."""
    while True:
        running = sum(routed.link is not None for routed in dispatcher.jobs)
        metrics.open_requests.labels("running").set(running)
        metrics.open_requests.labels("queued").set(len(tuple(dispatcher.jobs)) - running)
        for model in models.served:
            name = model.manifest.name
            phases = Counter(state.phase for state in models.workers(name))
            for phase in WorkerPhase:
                metrics.workers.labels(name, phase.value).set(phases[phase])
            try:
                metrics.waiting.labels(name).set(await model.queue.count_waiting())
            except REDIS_DOWN:
                continue  # the last count stands; others tell of the outage
        await asyncio.sleep(EVERY_S)
