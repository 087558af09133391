"""Scores of continuations: each is a request of its own, whose prompt goes on with it and which makes no new tokens.

prompt ── first continuation ──▶ its score; the prompt is in the prefix cache
          the others, some at once, with the same revision of the adapter ──▶ their scores
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from router.catalog.models import Models, ServedModel
from router.generation.admission import Admission
from router.generation.encoding import run_some_at_once
from router.generation.generation import Generation
from router.quotas.quotas import Grant
from router.request import PromptLogprobs, PromptOptions, Request, Stopping, Summary, WeightedAdapter
from router.text.prompt_tokenizer import PromptTokenizer
from rpc.errors import Internal, InvalidField

# Maximum continuations of one call that wait or run at once: its tenant's other requests get turns between them.
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """A continuation's ids, the log probability of each, and whether each is the likeliest at its place."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    greedy: tuple[bool, ...]


class Scoring:
    """Scores the continuations of one router's calls."""

    def __init__(self, generation: Generation, admission: Admission, models: Models, prompts: PromptTokenizer) -> None:
        self._generation = generation
        self._admission = admission
        self._models = models
        self._prompts = prompts

    async def score(
        self, request: Request, continuations: Sequence[str | tuple[int, ...]], deadline_s: float | None
    ) -> tuple[list[ContinuationScore], Summary]:
        """Return the scores in order, and one summary of all. Raises a CallError."""
        ends_at = math.inf if deadline_s is None else time.monotonic() + deadline_s
        prompt_ids, endings = await self._ids(request, continuations)
        request = replace(request, request_id=request.request_id or secrets.token_hex(8))
        parts = [_part(request, index, prompt_ids, ending) for index, ending in enumerate(endings)]
        prompt_tokens = sum(len(prompt_ids) + len(ending) for ending in endings)

        async with self._generation.reserved(request.tenant, request.request_id, prompt_tokens) as grant:

            async def run(part: Request) -> tuple[ContinuationScore, Summary]:
                left_s = None if ends_at == math.inf else ends_at - time.monotonic()
                return await self._run(part, left_s, grant)

            first = await run(parts[0])
            others = [partial(run, _with_revision(part, first[1])) for part in parts[1:]]
            scored = [first, *await run_some_at_once(others, AT_ONCE)]
        return [score for score, _ in scored], _total(request.request_id, [summary for _, summary in scored])

    async def _ids(
        self, request: Request, continuations: Sequence[str | tuple[int, ...]]
    ) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Return the prompt's ids and those of each continuation. Raises InvalidField."""
        model = self._models.get(request.model)
        prompt_ids = await self._admission.prompt_ids(request)
        if not prompt_ids:
            raise InvalidField(request.prompt_field, "has no tokens")
        endings = [
            ending if isinstance(ending, tuple) else await self._ending(request, model, prompt_ids, ending, index)
            for index, ending in enumerate(continuations)
        ]
        for index, ending in enumerate(endings):
            if not ending:
                raise InvalidField(f"continuations[{index}]", "has no tokens")
            if len(prompt_ids) + len(ending) > model.manifest.context_length:
                raise InvalidField(
                    f"continuations[{index}]",
                    f"{len(prompt_ids)} prompt tokens and its {len(ending)} do not fit the context of"
                    f" {model.manifest.context_length}",
                    reason="CONTEXT_EXCEEDED",
                )
        return prompt_ids, endings

    async def _ending(
        self, request: Request, model: ServedModel, prompt_ids: tuple[int, ...], text: str, index: int
    ) -> tuple[int, ...]:
        """Return the ids of a continuation: those that the prompt's text gains with it, if the prompt's own stay."""
        field, tenant, context = f"continuations[{index}]", request.tenant, model.manifest.context_length
        if isinstance(request.prompt, str):
            options = replace(request.prompt_options, truncate_to=None)
            whole = await self._prompts.tokenize(
                model.tokenizer, request.prompt + text, field, tenant, context, options
            )
            if whole[: len(prompt_ids)] == prompt_ids and len(whole) > len(prompt_ids):
                return whole[len(prompt_ids) :]
        options = replace(request.prompt_options, truncate_to=None, add_special_tokens=False)
        return await self._prompts.tokenize(model.tokenizer, text, field, tenant, context, options)

    async def _run(
        self, part: Request, deadline_s: float | None, grant: Grant | None
    ) -> tuple[ContinuationScore, Summary]:
        logprobs: PromptLogprobs | None = None
        async with aclosing(self._generation.run(part, deadline_s, part_of=grant)) as messages:
            async for message in messages:
                match message.event:
                    case PromptLogprobs() as logprobs:
                        pass
                    case Summary() as summary if logprobs is not None:
                        return _score(part, logprobs), summary
        raise Internal("a continuation ended without its log probabilities", reason="NO_LOGPROBS")


def _part(request: Request, index: int, prompt_ids: tuple[int, ...], ending: tuple[int, ...]) -> Request:
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
        fingerprint=fingerprint.hexdigest(),
    )


def _score(part: Request, logprobs: PromptLogprobs) -> ContinuationScore:
    assert isinstance(part.prompt, tuple), "parts have ids"
    ids, told = part.prompt[part.prompt_logprobs_start :], logprobs.tokens
    if len(told) != len(ids):
        raise Internal("log probabilities of a continuation are missing", reason="NO_LOGPROBS")
    best = [token.alternatives[0] for token in told]
    greedy = tuple(
        token_id == likeliest or token.logprob >= logprob
        for token_id, token, (likeliest, logprob) in zip(ids, told, best, strict=True)
    )
    return ContinuationScore(ids, tuple(token.logprob for token in told), greedy)


def _with_revision(request: Request, summary: Summary) -> Request:
    """Return a request for the revision that served the first: an alias may move meanwhile."""
    if summary.adapters:
        parts = (WeightedAdapter(_name_of(part.adapter), part.weight) for part in summary.adapters)
        return replace(request, adapters=tuple(parts))
    return replace(request, adapter=_name_of(summary.adapter_revision))


def _name_of(revision: str) -> str:
    """Return tenants/T/adapters/A/revisions/D as tenants/T/adapters/A@D."""
    return revision.replace("/revisions/", "@")


def _total(request_id: str, summaries: Sequence[Summary]) -> Summary:
    return replace(
        summaries[0],
        request_id=request_id,
        prompt_tokens=sum(summary.prompt_tokens for summary in summaries),
        cached_tokens=sum(summary.cached_tokens for summary in summaries),
        continuations=sum(summary.continuations for summary in summaries),
    )
