"""Placement of a job in the queue: its tenant's weight and share, the preferred workers, the charge for a load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.messages import Job
from broker.rendezvous import WorkerLoad, preferred
from broker.terms import Placement
from broker.worker_state import WorkerState

MIB = 1 << 20


class Placer:
    """Places jobs among the workers that serve their model."""

    def __init__(
        self,
        serving: Callable[[str, str], Sequence[WorkerState]],
        weight_of: Callable[[str], float],
        adapter_mib_tokens: float,
        queue_share_of: Callable[[str], float] = lambda tenant: 1.0,
    ) -> None:
        self._serving = serving
        self._weight_of = weight_of
        self._adapter_mib_tokens = adapter_mib_tokens
        self._queue_share_of = queue_share_of

    def place(self, job: Job) -> Placement:
        """Return the placement of a job."""
        weight, share = self._weight_of(job.tenant), self._queue_share_of(job.tenant)
        if job.adapter is None:
            return Placement(weight, queue_share=share)
        able = [
            WorkerLoad(state.worker_id, state.rows_running + state.rows_waiting, state.rows_limit)
            for state in self._serving(job.model, job.base_digest)
            if state.max_rank >= job.rank and state.max_tokens >= job.tokens
        ]
        load_tokens = job.adapter.weight_bytes / MIB * self._adapter_mib_tokens
        return Placement(weight, preferred(job.adapter.digest, able), load_tokens, share)
