"""Placement of a job in the queue: weight, share and key of its call, preferred workers, the charge for a load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.messages import Job
from broker.rendezvous import WorkerLoad, preferred
from broker.terms import NO_KEY, KeyTerms, Placement
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
        calling_key_terms: Callable[[], KeyTerms] = lambda: NO_KEY,
    ) -> None:
        self._serving = serving
        self._weight_of = weight_of
        self._adapter_mib_tokens = adapter_mib_tokens
        self._queue_share_of = queue_share_of
        self._calling_key_terms = calling_key_terms

    def place(self, job: Job) -> Placement:
        """Return the placement of a job."""
        weight, share = self._weight_of(job.tenant), self._queue_share_of(job.tenant)
        # Later attempts are made by no call; the outbox gives them the first one's terms.
        key = self._calling_key_terms() if job.attempt == 1 else NO_KEY
        if job.adapter is None:
            return Placement(weight, queue_share=share, key=key)
        able = [
            WorkerLoad(state.worker_id, state.rows_running + state.rows_waiting, state.rows_limit)
            for state in self._serving(job.model, job.base_digest)
            if state.max_rank >= job.rank and state.max_tokens >= job.tokens
        ]
        load_tokens = job.adapter.weight_bytes / MIB * self._adapter_mib_tokens
        return Placement(weight, preferred(job.adapter.digest, able), load_tokens, share, key)
