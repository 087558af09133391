"""A request at its router: all that is known of it from its admission to its end, and the requests of one router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from loraplex.contracts.broker.messages import AdapterRef, Job
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.generation.chat_format import CallGrammar
from loraplex.router.generation.chat_reader import ChatFormat
from loraplex.router.generation.resume import Began, ResumePayload, Resumption
from loraplex.router.generation.rollouts import Trial
from loraplex.router.quotas.quotas import CallBudget
from loraplex.router.request import Request, Summary, adapter_names
from loraplex.router.text.tokenizer import ModelTokenizer
from loraplex.runtime.rpc.errors import AlreadyExists

Key = tuple[str, str]


@dataclass(slots=True, eq=False)
class Run:
    """A request in its router; `routed` has its attempts and tokens."""

    request: Request
    # The job of its first attempt here; that of the current one is `routed.job`.
    job: Job
    tokenizer: ModelTokenizer
    # Reads reasoning and calls out of an answer; None: the answer is text alone.
    chat_format: ChatFormat | None = None
    # Fields of sampling that the request left unset and the model has values for.
    filled: Mapping[str, Any] = field(default_factory=dict)
    # The grammar of the chat's tools, and the parts of their schemas that it leaves free.
    calls: CallGrammar = field(default_factory=CallGrammar)
    # The tokens that its client had when it was resumed here; None: it began here.
    resumption: Resumption | None = None
    # The activated adapter that the prompt does not invoke: the base model answers for it.
    inactive: AdapterRef | None = None
    # Since it is in the queue.
    routed: RoutedJob = field(init=False)
    # The reservation of the request's tokens; None: its tenant has no limits, or it is a part of a larger call.
    budget: CallBudget | None = None
    # The reservation of the larger call that it is a part of.
    part_of: CallBudget | None = None
    # True once its client has a resume token of this router.
    gave_token: bool = False
    # True once the whole answer is on its way to the client.
    complete: bool = False
    # Figures for the adapter's rollout; None: the adapter is not being rolled out.
    trial: Trial | None = None

    @property
    def key(self) -> Key:
        """Return the tenant and the request id."""
        return self.job.tenant, self.job.request_id

    @property
    def resumes(self) -> int:
        """Return how many times the request has been resumed."""
        return self.resumption.payload.resumes + 1 if self.resumption else 0

    @property
    def began(self) -> Began:
        """Return how the request began, here or where it was first admitted."""
        if self.resumption is not None:
            return self.resumption.payload.began
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
    def payload(self) -> ResumePayload:
        """Return what a router needs to go on with the request."""
        job = self.routed.job
        return ResumePayload(
            request_id=job.request_id,
            fingerprint=self.request.fingerprint,
            model=job.model,
            base_digest=job.base_digest,
            adapter=job.adapter or self.inactive,
            seed=job.sampling.seed,
            max_tokens=job.stopping.max_tokens,
            began=self.began,
            resumes=self.resumes,
            rendered_at_s=self.request.rendered_at_s,
            reservation=self.budget.reservation.id if self.budget else "",
            epochs=self.resumption.payload.epochs if self.resumption else (),
            filled=dict(self.filled),
            free_parts=tuple(sorted(self.calls.free)),
        )

    def move_to(self, call: CallBudget) -> None:
        """Count the request in the reservation of a later call, and no longer in that of the call it was a part of."""
        if self.part_of is not None:
            self.part_of.jobs.remove(self.routed)
        call.jobs.append(self.routed)
        self.part_of = call

    def settle(self) -> None:
        """End the request's reservation, but leave one whose client may resume it for a while."""
        if self.budget is not None:
            if self.complete or not (self.gave_token or self.resumption):
                self.budget.settle()
            else:
                self.budget.leave()

    def suits(self, resumption: Resumption | None) -> bool:
        """Return whether a call can read this run: the same answer, from as early on as the call needs it."""
        if resumption is None:
            return self.resumption is None
        payload, job = resumption.payload, self.routed.job
        adapter = job.adapter or self.inactive
        if (payload.seed, payload.adapter, payload.base_digest) != (job.sampling.seed, adapter, job.base_digest):
            return False
        if (payload.filled, payload.max_tokens) != (self.filled, job.stopping.max_tokens):
            return False
        if frozenset(payload.free_parts) != self.calls.free:
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
        revision, parts = adapter_names(job.adapter)
        return Summary(
            request_id=job.request_id,
            adapter_revision=revision,
            prompt_tokens=len(job.prompt_ids),
            cached_tokens=began.cached_tokens,
            completion_tokens=completion_tokens,
            queue_s=began.queue_s,
            adapter_s=began.adapter_s,
            ttft_s=began.ttft_s,
            # By the wall clock, since it spans routers; two hosts may disagree on it.
            decode_s=max(0.0, time.time() - began.first_at_s),
            continuations=self.resumes + self.routed.continuations,
            adapters=parts,
            not_enforced=self.calls.not_enforced,
            drafts=self.routed.drafts,
            activated=None if job.invoked_at is None and not self.inactive else self.inactive is None,
        )


class Runs:
    """The runs of one router, each once."""

    def __init__(self) -> None:
        self._runs: dict[Key, Run] = {}
        # Requests that are being admitted, and the end of that.
        self._admitting: dict[Key, asyncio.Event] = {}

    def __iter__(self) -> Iterator[Run]:
        return iter(tuple(self._runs.values()))

    async def find(self, tenant: str, request_id: str, fingerprint: str = "") -> Run | None:
        """Return the run of that tenant and request id, once no call is being admitted under it.

        Raises AlreadyExists where another body than that of the fingerprint runs under that id.
        """
        key = (tenant, request_id)
        while key in self._admitting:
            await self._admitting[key].wait()
        run = self._runs.get(key)
        if run is not None and fingerprint and run.request.fingerprint != fingerprint:
            raise AlreadyExists(f"request_id {request_id} is running with another body", reason="REQUEST_ID_RUNNING")
        return run

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
        removed = self._runs.get(run.key) is run
        if removed:
            del self._runs[run.key]
        return removed
