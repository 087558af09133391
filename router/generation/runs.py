"""The requests that run on a router, by tenant and request id, and how far each has come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from router.dispatch.routed_job import RoutedJob
from router.generation.admission import Admitted
from router.generation.resume import Began, ResumeClaims, Resumption
from router.quotas.quotas import Grant
from router.request import Request, Summary, WeightedAdapter
from rpc.errors import AlreadyExists

Key = tuple[str, str]


@dataclass(slots=True, eq=False)
class Run:
    """An admitted request; where it was resumed here, `resumption` has what its client had by then."""

    fingerprint: str
    routed: RoutedJob
    admitted: Admitted
    resumption: Resumption | None = None
    # Time of the wall clock in seconds that the request's chat template saw.
    rendered_at_s: float = 0.0
    # The reservation of the request's tokens; None: its tenant has no limits, or it is a part of a larger call.
    grant: Grant | None = None
    # The reservation of the larger call that it is a part of.
    part_of: Grant | None = None
    # True once its client has a resume token of this router.
    gave_token: bool = False
    # True once the whole answer is on its way to the client.
    complete: bool = False

    @property
    def key(self) -> Key:
        """Return the tenant and the request id."""
        return self.routed.job.tenant, self.routed.job.request_id

    @property
    def resumes(self) -> int:
        """Return how many times the request has been resumed."""
        return self.resumption.claims.resumes + 1 if self.resumption else 0

    @property
    def began(self) -> Began:
        """Return how the request began, here or where it was first admitted."""
        if self.resumption is not None:
            return self.resumption.claims.began
        routed, now = self.routed, time.monotonic()
        first_at = routed.first_token_at or now
        return Began(
            cached_tokens=routed.cached_tokens,
            queue_s=(routed.claimed_at or now) - routed.admitted_at,
            adapter_s=routed.adapter_ms / 1e3,
            ttft_s=first_at - routed.admitted_at,
            first_at_s=time.time() - (now - first_at),
        )

    @property
    def claims(self) -> ResumeClaims:
        """Return what a router needs to go on with the request."""
        job = self.routed.job
        return ResumeClaims(
            request_id=job.request_id,
            fingerprint=self.fingerprint,
            model=job.model,
            base_digest=job.base_digest,
            adapter=job.adapter,
            seed=job.sampling.seed,
            max_tokens=job.stopping.max_tokens,
            began=self.began,
            resumes=self.resumes,
            rendered_at_s=self.rendered_at_s,
            reservation=self.grant.reservation.id if self.grant else "",
            epochs=self.resumption.claims.epochs if self.resumption else (),
        )

    def move_to(self, call: Grant) -> None:
        """Count the request in the reservation of a later call, and no longer in that of the call it was a part of."""
        if self.part_of is not None:
            self.part_of.jobs.remove(self.routed)
        call.jobs.append(self.routed)
        self.part_of = call

    def settle(self) -> None:
        """End the request's reservation, but leave one whose client may resume it for a while."""
        if self.grant is not None:
            if self.complete or not (self.gave_token or self.resumption):
                self.grant.settle()
            else:
                self.grant.leave()

    def suits(self, resumption: Resumption | None) -> bool:
        """Return whether a call can read this run: the same answer, from as early on as the call needs it."""
        if resumption is None:
            return self.resumption is None
        claims, job = resumption.claims, self.routed.job
        if (claims.seed, claims.adapter, claims.base_digest) != (job.sampling.seed, job.adapter, job.base_digest):
            return False
        began_with = self.resumption.received if self.resumption else {}
        return all(
            len(resumption.of_choice(choice).token_ids) >= len(here.token_ids)
            and resumption.of_choice(choice).finished >= here.finished
            for choice, here in began_with.items()
        )

    def summary(self, completion_tokens: int) -> Summary:
        """Return the last message of the stream."""
        job, began = self.routed.job, self.began
        parts = job.adapter.parts if job.adapter else ()
        return Summary(
            request_id=job.request_id,
            adapter_revision=job.adapter.revision if job.adapter else "",
            prompt_tokens=len(job.prompt_ids),
            cached_tokens=began.cached_tokens,
            completion_tokens=completion_tokens,
            queue_s=began.queue_s,
            adapter_s=began.adapter_s,
            ttft_s=began.ttft_s,
            # By the wall clock, since it spans routers; two hosts may disagree on it.
            decode_s=max(0.0, time.time() - began.first_at_s),
            continuations=self.resumes + self.routed.continuations,
            adapters=tuple(WeightedAdapter(part.adapter.revision, part.weight) for part in parts),
        )


class Runs:
    """The runs of one router, each once."""

    def __init__(self) -> None:
        self._runs: dict[Key, Run] = {}
        # Requests that are being admitted, and the end of that.
        self._admitting: dict[Key, asyncio.Event] = {}

    def __iter__(self) -> Iterator[Run]:
        return iter(tuple(self._runs.values()))

    async def find(self, request: Request) -> Run | None:
        """Return the run of that tenant and request id, once no call is being admitted under it.

        Raises AlreadyExists where another body runs under that id.
        """
        run = await self.named(request.tenant, request.request_id)
        if run is not None and run.fingerprint != request.fingerprint:
            message = f"request_id {request.request_id} is running with another body"
            raise AlreadyExists(message, reason="REQUEST_ID_RUNNING")
        return run

    async def named(self, tenant: str, request_id: str) -> Run | None:
        """Return the run of that tenant and request id, once no call is being admitted under it."""
        key = (tenant, request_id)
        while key in self._admitting:
            await self._admitting[key].wait()
        return self._runs.get(key)

    @contextmanager
    def admitting(self, request: Request) -> Iterator[None]:
        """Make other calls of that request id wait meanwhile."""
        key = (request.tenant, request.request_id)
        event = self._admitting[key] = asyncio.Event()
        try:
            yield
        finally:
            del self._admitting[key]
            event.set()

    def add(self, run: Run) -> None:
        """Add a new run."""
        self._runs[run.key] = run

    def remove(self, run: Run) -> bool:
        """Remove a run; False where it is removed already."""
        found = self._runs.get(run.key) is run
        if found:
            del self._runs[run.key]
        return found
