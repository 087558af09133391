"""The calls without a stream, each of several jobs: vectors of texts, and scores of continuations.

texts ──admit──▶ jobs ──▶ TEXTS_AT_ONCE in queue and workers ──▶ vectors, in order; the first error ends all of them

prompt ── first continuation ──▶ its score; the prompt is in the prefix cache
          the others, some at once, with the same revision of the adapter ──▶ their scores

A continuation is a request of its own, whose prompt goes on with it and which makes no new tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from loraplex.contracts.broker.messages import Job
from loraplex.router.catalog.adapters import Classifier
from loraplex.router.dispatch.routed_job import RoutedJob
from loraplex.router.generation.admission import Admission
from loraplex.router.generation.continuations import continuation_ids
from loraplex.router.generation.generation import Generation
from loraplex.router.quotas.quotas import NO_FACTS, CallBudget, Facts, rates_of
from loraplex.router.request import (
    EncodeRequest,
    PromptLogprobs,
    PromptOptions,
    Request,
    Stopping,
    Summary,
    WeightedAdapter,
    adapter_names,
)
from loraplex.runtime.rpc.errors import Internal

T = TypeVar("T")

# Maximum texts of one call that wait or run at once: about a batch, so that one call can fill a worker, and its
# tenant's other requests get turns between them; and maximum continuations.
TEXTS_AT_ONCE = 32
CONTINUATIONS_AT_ONCE = 8


async def run_some_at_once(parts: Sequence[Callable[[], Awaitable[T]]], limit: int) -> list[T]:
    """Run all parts, at most `limit` at once; return their results in order.

    The first error ends all others, and is raised when they have ended; so does a cancellation.
    """
    slots = asyncio.Semaphore(limit)

    async def run(part: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await part()

    tasks = [asyncio.create_task(run(part)) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Vector:
    """A text's vector as the model gives it, the number of its tokens, and the classifier that it may be logits of."""

    values: tuple[float, ...]
    prompt_tokens: int
    classifier: Classifier


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """A continuation's ids, the log probability of each, and whether each is the likeliest at its place."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    greedy: tuple[bool, ...]


class UnaryCalls:
    """Answers one router's calls of Embed, Classify and Score. Cancelling a call cancels the work on all its parts."""

    def __init__(self, generation: Generation, admission: Admission) -> None:
        self._generation = generation
        self._admission = admission

    async def encode(
        self, request: EncodeRequest, deadline_s: float | None, write: Callable[[Vector], T]
    ) -> tuple[list[T], Summary]:
        """Return what `write` makes of the texts' vectors, in order, and one summary of all. Raises a CallError."""
        remaining_s = countdown(deadline_s)
        jobs, classifier = await self._admission.admit_texts(request)
        prompt_tokens = sum(len(job.prompt_ids) for job in jobs)
        async with self._generation.reserved(request.tenant, NO_FACTS.of_job(jobs[0]), prompt_tokens) as budget:

            async def run(job: Job) -> tuple[T, RoutedJob]:
                if (seconds := remaining_s()) is not None:
                    job = replace(job, deadline_ms=max(1, round(seconds * 1e3)))
                routed = await self._generation.complete(job, budget)
                # At once, not all at the end: a large call must not hold up other clients' tokens.
                written = write(_vector(routed, classifier))
                routed.choices[0].vector = ()  # it takes several times the memory of what was written
                return written, routed

            ended = await run_some_at_once([partial(run, job) for job in jobs], TEXTS_AT_ONCE)
        summary = _summary([routed for _, routed in ended])
        return [written for written, _ in ended], replace(summary, rate_limits=rates_of(budget))

    async def score(
        self, request: Request, continuations: Sequence[str | tuple[int, ...]], deadline_s: float | None
    ) -> tuple[list[ContinuationScore], Summary]:
        """Return the scores in order, and one summary of all. Raises a CallError."""
        remaining_s = countdown(deadline_s)
        request_id = request.request_id or secrets.token_hex(8)
        # All parts are on one side of a rollout.
        request = replace(request, request_id=request_id, session_id=request.session_id or request_id)
        prompt_ids, endings, model, revision = await continuation_ids(self._admission, request, continuations)
        facts = Facts(request_id=request_id, model=model, adapter_revision=revision)
        parts = [continuation_request(request, index, prompt_ids, ending) for index, ending in enumerate(endings)]
        prompt_tokens = sum(len(prompt_ids) + len(ending) for ending in endings)
        async with self._generation.reserved(request.tenant, facts, prompt_tokens) as budget:

            async def run(part: Request) -> tuple[ContinuationScore, Summary]:
                return await self.score_part(part, remaining_s(), budget)

            first = await run(parts[0])
            others = [partial(run, with_revision(part, first[1])) for part in parts[1:]]
            scored = [first, *await run_some_at_once(others, CONTINUATIONS_AT_ONCE)]
        summary = total_of(request.request_id, [summary for _, summary in scored])
        return [score for score, _ in scored], replace(summary, rate_limits=rates_of(budget))

    async def score_part(
        self, part: Request, deadline_s: float | None, budget: CallBudget | None
    ) -> tuple[ContinuationScore, Summary]:
        logprobs: PromptLogprobs | None = None
        async with aclosing(self._generation.run(part, deadline_s, part_of=budget)) as messages:
            async for message in messages:
                match message.event:
                    case PromptLogprobs() as logprobs:
                        pass
                    case Summary() as summary if logprobs is not None:
                        return _score(part, logprobs), summary
        raise Internal("a continuation ended without its log probabilities", reason="NO_LOGPROBS")


def countdown(deadline_s: float | None) -> Callable[[], float | None]:
    """Return a function that returns how many seconds are left of a deadline; None: there is none."""
    ends_at = None if deadline_s is None else time.monotonic() + deadline_s
    return lambda: None if ends_at is None else ends_at - time.monotonic()


def _vector(routed: RoutedJob, classifier: Classifier) -> Vector:
    vector = routed.choices[0].vector
    if not vector or len(vector) != len(classifier.labels or vector):
        raise Internal(f"{len(vector)} logits of {len(classifier.labels)} labels", reason="WRONG_LOGITS")
    return Vector(vector, len(routed.job.prompt_ids), classifier)


def _summary(ended: Sequence[RoutedJob]) -> Summary:
    """Sum up a call: tokens of all texts, and the longest of each time."""
    job = ended[0].job
    revision, parts = adapter_names(job.adapter)
    return Summary(
        request_id=job.request_id,
        adapter_revision=revision,
        prompt_tokens=sum(len(routed.job.prompt_ids) for routed in ended),
        cached_tokens=sum(routed.cached_tokens for routed in ended),
        completion_tokens=0,
        queue_s=max((routed.claimed_at or routed.admitted_at) - routed.admitted_at for routed in ended),
        adapter_s=max(routed.adapter_ms for routed in ended) / 1e3,
        ttft_s=max((routed.first_token_at or routed.admitted_at) - routed.admitted_at for routed in ended),
        decode_s=0.0,
        continuations=sum(routed.continuations for routed in ended),
        adapters=parts,
    )


def continuation_request(request: Request, index: int, prompt_ids: tuple[int, ...], ending: tuple[int, ...]) -> Request:
    """Return the request whose prompt's log probabilities, from the continuation on, are a continuation's."""
    prompt = (*prompt_ids, *ending)
    # The message's fingerprint knows no continuations: a call with others must not take this one over.
    fingerprint = hashlib.sha256(f"{request.fingerprint} {len(prompt_ids)} ".encode() + array("I", prompt).tobytes())
    return replace(
        request,
        prompt=prompt,
        prompt_field=f"continuations[{index}]",
        request_id=f"{request.request_id}.{index}",
        prompt_options=PromptOptions(),
        stopping=Stopping(max_tokens=0),
        prompt_logprobs=1,
        prompt_logprobs_start=len(prompt_ids),
        scored_from=len(prompt_ids),
        fingerprint=fingerprint.hexdigest(),
    )


def _score(part: Request, logprobs: PromptLogprobs) -> ContinuationScore:
    assert isinstance(part.prompt, tuple), "parts have ids"
    ids, tokens = part.prompt[part.prompt_logprobs_start :], logprobs.tokens
    if len(tokens) != len(ids):
        raise Internal("log probabilities of a continuation are missing", reason="NO_LOGPROBS")
    best = [token.alternatives[0] for token in tokens]
    greedy = tuple(
        token_id == likeliest or token.logprob >= logprob
        for token_id, token, (likeliest, logprob) in zip(ids, tokens, best, strict=True)
    )
    return ContinuationScore(ids, tuple(token.logprob for token in tokens), greedy)


def with_revision(request: Request, summary: Summary) -> Request:
    """Return a request for the revision that served the first: an alias may move meanwhile."""
    if summary.adapters:
        parts = (WeightedAdapter(name_of(part.adapter), part.weight) for part in summary.adapters)
        return replace(request, adapters=tuple(parts))
    return replace(request, adapter=name_of(summary.adapter_revision))


def name_of(revision: str) -> str:
    """Return tenants/T/adapters/A/revisions/D as tenants/T/adapters/A@D."""
    return revision.replace("/revisions/sha256:", "@sha256:")


def total_of(request_id: str, summaries: Sequence[Summary]) -> Summary:
    """Return the summary of a call whose parts ran as jobs: the tokens that these sampled are nobody's answer."""
    return replace(
        summaries[0],
        request_id=request_id,
        prompt_tokens=sum(summary.prompt_tokens for summary in summaries),
        cached_tokens=sum(summary.cached_tokens for summary in summaries),
        completion_tokens=0,
        continuations=sum(summary.continuations for summary in summaries),
    )
