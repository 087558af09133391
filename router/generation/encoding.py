"""Vectors of texts: each text of a call is a job of its own, some of which wait or run at once.

texts ──admit──▶ jobs ──▶ AT_ONCE of them in queue and workers ──▶ vectors, in order; the first error ends all of them
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from broker.messages import Job
from router.catalog.classifiers import Classifier
from router.dispatch.routed_job import RoutedJob
from router.encode_request import EncodeRequest
from router.generation.encode_admission import EncodeAdmission
from router.generation.generation import Generation
from router.generation.turns import run_some_at_once
from router.request import Summary, WeightedAdapter
from rpc.errors import Internal, Unavailable

T = TypeVar("T")

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

    def __init__(self, generation: Generation, admission: EncodeAdmission) -> None:
        self._generation = generation
        self.admission = admission

    async def encode(
        self, request: EncodeRequest, deadline_s: float | None, write: Callable[[Vector], T]
    ) -> tuple[list[T], Summary]:
        """Return what `write` makes of the texts' vectors, in order, and one summary of all.

        Raises a CallError. Cancelling the call cancels the work on all texts.
        """
        ends_at = math.inf if deadline_s is None else time.monotonic() + deadline_s
        admitted = await self.admission.admit(request)
        prompt_tokens = sum(len(job.prompt_ids) for job in admitted.jobs)
        async with self._generation.reserved(request.tenant, admitted.jobs[0].request_id, prompt_tokens) as grant:

            async def run(job: Job) -> tuple[T, RoutedJob]:
                if ends_at < math.inf:
                    job = replace(job, deadline_ms=max(1, round((ends_at - time.monotonic()) * 1e3)))
                routed = await self._generation.complete(job, grant)
                # At once, not all at the end: a large call must not hold up other clients' tokens.
                written = write(_vector(routed, admitted.classifier))
                routed.choices[0].vector = ()  # it takes several times the memory of what was written
                return written, routed

            ended = await run_some_at_once([partial(run, job) for job in admitted.jobs], AT_ONCE)
        return [written for written, _ in ended], _summary([routed for _, routed in ended])


def _vector(routed: RoutedJob, classifier: Classifier) -> Vector:
    vector = routed.choices[0].vector
    if not vector:
        raise Unavailable("a worker of an older version took a text and gave no vector", reason="OLD_WORKER")
    if len(vector) != len(classifier.labels or vector):
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
