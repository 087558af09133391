"""Vectors of texts: each text of a call is a job of its own, some of which wait or run at once.

texts ──admit──▶ jobs ──▶ AT_ONCE of them in queue and workers ──▶ vectors, in order; the first error ends all of them
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from broker.messages import AdapterRef, Job
from options import Encode, StoppingParams
from router.catalog.adapters import AdapterConfigs, Classifier, check_rank, find_classifier, resolve_adapters
from router.catalog.manifest import Manifest
from router.catalog.models import Models
from router.catalog.store_client import StoreClient
from router.dispatch.routed_job import RoutedJob
from router.dispatch.worker_links import RelayReach
from router.generation.admission import check_ids, workers_for_new_jobs
from router.generation.generation import Generation
from router.request import EncodeRequest, Summary, WeightedAdapter
from router.text.prompt_tokenizer import PromptTokenizer
from rpc.errors import Internal, InvalidField

T = TypeVar("T")


async def run_some_at_once(parts: Sequence[Callable[[], Awaitable[T]]], limit: int) -> list[T]:
    """Run all parts, at most `limit` at once; return their results in order.

    The first error ends all others, and is raised when they have ended; so does a cancellation.
    """
    turns = asyncio.Semaphore(limit)

    async def run(part: Callable[[], Awaitable[T]]) -> T:
        async with turns:
            return await part()

    tasks = [asyncio.create_task(run(part)) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# Maximum texts of one call that wait or run at once: about a batch, so that one call can fill a worker, and its
# tenant's other requests get turns between them.
AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Vector:
    """A text's vector as the model gives it, the number of its tokens, and the classifier that it may be logits of."""

    values: tuple[float, ...]
    prompt_tokens: int
    classifier: Classifier


class Encoding:
    """Encodes the texts of one router's calls."""

    def __init__(
        self,
        generation: Generation,
        models: Models,
        store: StoreClient,
        configs: AdapterConfigs,
        reply_to: str,
        reach: RelayReach,
        prompts: PromptTokenizer,
    ) -> None:
        self._generation = generation
        self._models = models
        self._store = store
        self._configs = configs
        self._reply_to = reply_to
        self._reach = reach
        self._prompts = prompts

    async def encode(
        self, request: EncodeRequest, deadline_s: float | None, write: Callable[[Vector], T]
    ) -> tuple[list[T], Summary]:
        """Return what `write` makes of the texts' vectors, in order, and one summary of all.

        Raises a CallError. Cancelling the call cancels the work on all texts.
        """
        ends_at = math.inf if deadline_s is None else time.monotonic() + deadline_s
        jobs, classifier = await self._admit(request)
        prompt_tokens = sum(len(job.prompt_ids) for job in jobs)
        async with self._generation.reserved(request.tenant, jobs[0].request_id, prompt_tokens) as grant:

            async def run(job: Job) -> tuple[T, RoutedJob]:
                if ends_at < math.inf:
                    job = replace(job, deadline_ms=max(1, round((ends_at - time.monotonic()) * 1e3)))
                routed = await self._generation.complete(job, grant)
                # At once, not all at the end: a large call must not hold up other clients' tokens.
                written = write(_vector(routed, classifier))
                routed.choices[0].vector = ()  # it takes several times the memory of what was written
                return written, routed

            ended = await run_some_at_once([partial(run, job) for job in jobs], AT_ONCE)
        return [written for written, _ in ended], _summary([routed for _, routed in ended])

    async def _admit(self, request: EncodeRequest) -> tuple[Sequence[Job], Classifier]:
        """Return the jobs of a request's inputs, in order, all of one revision, and the classifier that they ask for.

        Raises a CallError where any input can't be served.
        """
        model = self._models.get(request.model)
        manifest = model.manifest
        adapter = await resolve_adapters(request, manifest, self._store)
        classifier = await find_classifier(request, manifest, adapter, self._configs)
        workers = workers_for_new_jobs(self._models, self._reach, manifest)
        check_rank(adapter, max(state.max_rank for state in workers))
        limit = min(manifest.context_length, max(state.max_tokens for state in workers))
        encoded = await self._prompts.tokenize_inputs(model.tokenizer, request, limit)
        for (ids, _), field in zip(encoded, request.fields, strict=True):
            if not ids:
                raise InvalidField(field, "has no tokens")
            check_ids(field, ids, manifest.vocab_size)
        return self._jobs(request, manifest, adapter, encoded), classifier

    def _jobs(
        self,
        request: EncodeRequest,
        manifest: Manifest,
        adapter: AdapterRef | None,
        encoded: Sequence[tuple[tuple[int, ...], int]],
    ) -> Sequence[Job]:
        request_id = request.request_id or secrets.token_hex(8)
        # New with every call: messages about an older call of this request id must not reach these jobs.
        call = f"{request.tenant}/{request_id}/{secrets.token_hex(6)}"
        return [
            Job(
                job_id=f"{call}.{index}",
                request_id=request_id,
                tenant=request.tenant,
                model=manifest.name,
                base_digest=manifest.digest,
                reply_to=self._reply_to,
                adapter=adapter,
                prompt_ids=ids,
                stopping=StoppingParams(max_tokens=0),
                priority=request.priority,
                traceparent=request.traceparent,
                encode=Encode(request.task, request.pooling, pair_tokens),
            )
            for index, (ids, pair_tokens) in enumerate(encoded)
        ]


def _vector(routed: RoutedJob, classifier: Classifier) -> Vector:
    vector = routed.choices[0].vector
    if not vector or len(vector) != len(classifier.labels or vector):
        raise Internal(f"{len(vector)} logits of {len(classifier.labels)} labels", reason="WRONG_LOGITS")
    return Vector(vector, len(routed.job.prompt_ids), classifier)


def _summary(ended: Sequence[RoutedJob]) -> Summary:
    """Sum up a call: tokens of all texts, and the longest of each time."""
    first = ended[0].job
    parts = first.adapter.parts if first.adapter else ()
    return Summary(
        request_id=first.request_id,
        adapter_revision=first.adapter.revision if first.adapter else "",
        prompt_tokens=sum(len(routed.job.prompt_ids) for routed in ended),
        cached_tokens=sum(routed.cached_tokens for routed in ended),
        completion_tokens=0,
        queue_s=max((routed.claimed_at or routed.admitted_at) - routed.admitted_at for routed in ended),
        adapter_s=max(routed.adapter_ms for routed in ended) / 1e3,
        ttft_s=max((routed.first_token_at or routed.admitted_at) - routed.admitted_at for routed in ended),
        decode_s=0.0,
        continuations=sum(routed.continuations for routed in ended),
        adapters=tuple(WeightedAdapter(part.adapter.revision, part.weight) for part in parts),
    )
