"""The operators' API: what the cluster is doing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import grpc
from loraplex.cluster.v1 import cluster_pb2 as pb
from loraplex.cluster.v1 import cluster_pb2_grpc

from broker.connection import REDIS_DOWN
from broker.messages import WorkerPhase, WorkerState
from router.dispatch import Dispatcher
from router.models import Models
from rpc.errors import NotBuilt, Unavailable

Context = grpc.aio.ServicerContext[Any, Any]

_PHASES = {WorkerPhase.SERVING: pb.WORKER_PHASE_SERVING, WorkerPhase.DRAINING: pb.WORKER_PHASE_DRAINING}


class ClusterService(cluster_pb2_grpc.ClusterServiceServicer):
    """loraplex.cluster.v1.ClusterService."""

    def __init__(self, models: Models, dispatcher: Dispatcher) -> None:
        self._models = models
        self._dispatcher = dispatcher

    async def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersResponse:
        """The live workers of all models, as they last said."""
        states = [state for model in self._models.served for state in await self._models.living(model)]
        return pb.ListWorkersResponse(workers=[_worker(state) for state in states])

    async def ListQueues(self, request: pb.ListQueuesRequest, context: Context) -> pb.ListQueuesResponse:
        """How much waits and runs, by model."""
        queues = []
        for model in self._models.served:
            running = sum(state.rows_running for state in await self._models.living(model))
            try:
                waiting = await model.queue.count_waiting()
            except REDIS_DOWN as error:
                raise Unavailable("Redis does not answer", reason="QUEUE_DOWN") from error
            queues.append(pb.Queue(model=model.manifest.name, waiting=waiting, running=running))
        return pb.ListQueuesResponse(queues=queues)

    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        """The jobs that this router owns."""
        return pb.ListJobsResponse(
            jobs=[
                pb.Job(
                    job_id=track.job.job_id,
                    tenant=track.job.tenant,
                    adapter_revision=track.job.adapter.revision if track.job.adapter else "",
                    attempt=track.job.attempt,
                    worker_id=track.link.worker_id if track.link else "",
                    prompt_tokens=len(track.job.prompt_ids),
                    completion_tokens=track.emitted_tokens,
                )
                for track in self._dispatcher.tracks
            ]
        )

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        """Not built yet."""
        raise NotBuilt("DrainWorker")

    async def WarmAdapter(self, request: pb.WarmAdapterRequest, context: Context) -> pb.WarmAdapterResponse:
        """Not built yet."""
        raise NotBuilt("WarmAdapter")

    async def PinAdapter(self, request: pb.PinAdapterRequest, context: Context) -> pb.PinAdapterResponse:
        """Not built yet."""
        raise NotBuilt("PinAdapter")

    async def UnpinAdapter(self, request: pb.UnpinAdapterRequest, context: Context) -> pb.UnpinAdapterResponse:
        """Not built yet."""
        raise NotBuilt("UnpinAdapter")


def _worker(state: WorkerState) -> pb.Worker:
    return pb.Worker(
        worker_id=state.worker_id,
        incarnation=state.incarnation,
        phase=_PHASES[state.phase],
        model=state.model,
        rows_running=state.rows_running,
        rows_waiting=state.rows_waiting,
        rows_limit=state.rows_limit,
        blocks=pb.Blocks(
            total=state.blocks_total,
            free=state.blocks_free,
            cached=state.blocks_cached,
            referenced=state.blocks_referenced,
        ),
        adapter_slots=pb.AdapterSlots(total=state.slots_total, used=state.slots_used, pinned=state.slots_pinned),
        adapter_tiers=pb.AdapterTiers(**asdict(state.tiers)),
        adapters=state.adapters,
        steps=state.steps,
        host=state.host,
        pid=state.pid,
        engine_pid=state.engine_pid,
    )
