"""A request from admission to its last message; read it together with docs/request-life.md."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from broker.messages import AdapterRef, Job, StoppingParams
from router.adapters import resolve_adapters
from router.answers import Answers
from router.dispatch import Dispatcher
from router.models import Models, ServedModel
from router.request import Event, Request, Summary, WeightedAdapter
from router.store_client import StoreClient
from router.text import encode_prompt
from router.track import Track
from rpc.errors import InvalidField, Unavailable

DEFAULT_MAX_TOKENS = 128


class Generation:
    """Runs requests."""

    def __init__(self, models: Models, store: StoreClient, dispatcher: Dispatcher, reply_to: str) -> None:
        self._models = models
        self._store = store
        self._dispatcher = dispatcher
        self._reply_to = reply_to

    async def run(self, request: Request, deadline_s: float | None) -> AsyncGenerator[Event]:
        """The request's events, a Summary last. Leaving early stops the work. Raises a CallError."""
        model = self._models.get(request.model)
        adapter = await self._adapter(request, model)
        job = await self._job(request, model, adapter, deadline_s)
        first_at = None
        async with self._dispatcher.track(job) as track:
            answers = Answers(request, model.text, track)
            async with aclosing(answers.events()) as events:
                async for event in events:
                    first_at = first_at or time.monotonic()
                    yield event
        yield _summary(track, answers.tokens, first_at or time.monotonic())

    async def _adapter(self, request: Request, model: ServedModel) -> AdapterRef | None:
        ranks = [state.max_rank for state in self._models.serving(model.manifest.name)]
        return await resolve_adapters(request, model.manifest, max(ranks, default=None), self._store)

    async def _job(
        self, request: Request, model: ServedModel, adapter: AdapterRef | None, deadline_s: float | None
    ) -> Job:
        manifest = model.manifest
        prompt_ids = await encode_prompt(model.text, request.prompt, request.prompt_field)
        workers = self._models.serving(manifest.name)
        if not workers:
            raise Unavailable(f"no worker serves {manifest.name} now", reason="NO_WORKER")
        # What is longer than every worker's KV cache would wait for ever.
        context = min(manifest.context_length, max(state.max_tokens for state in workers))
        stopping = request.stopping
        max_tokens = _max_tokens(request, len(prompt_ids), context)
        _check_ids(request.prompt_field, prompt_ids, manifest.vocab_size)
        _check_ids("stopping.stop_token_ids", stopping.stop_token_ids, manifest.vocab_size)
        _check_ids("sampling.logit_bias", tuple(i for i, _ in request.sampling.logit_bias), manifest.vocab_size)
        request_id = request.request_id or secrets.token_hex(8)
        return Job(
            # New with every admission: what is still on its way for an older call of that id must not meet this one.
            job_id=f"{request.tenant}/{request_id}/{secrets.token_hex(6)}",
            request_id=request_id,
            tenant=request.tenant,
            model=manifest.name,
            base_digest=manifest.digest,
            reply_to=self._reply_to,
            adapter=adapter,
            prompt_ids=prompt_ids,
            sampling=request.sampling,
            n=request.best_of,
            # The best are chosen by them.
            logprobs=0 if request.logprobs is None and request.best_of > request.n else request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            priority=request.priority,
            stopping=StoppingParams(
                max_tokens=max_tokens,
                min_tokens=stopping.min_tokens,
                stop_token_ids=stopping.stop_token_ids,
                ignore_eos=stopping.ignore_eos,
            ),
            seed=secrets.randbits(63) if request.seed is None else request.seed,
            deadline_ms=0 if deadline_s is None else max(1, round(deadline_s * 1e3)),
        )


def _max_tokens(request: Request, prompt: int, context: int) -> int:
    if prompt == 0:
        raise InvalidField(request.prompt_field, "has no tokens")
    room = context - prompt
    wanted = request.stopping.max_tokens
    if room < 1 or (wanted is not None and wanted > room):
        raise InvalidField(
            request.prompt_field if room < 1 else "stopping.max_tokens",
            f"{prompt} prompt tokens and {wanted or 1} more do not fit the context of {context}",
            reason="CONTEXT_EXCEEDED",
        )
    return min(DEFAULT_MAX_TOKENS, room) if wanted is None else wanted


def _check_ids(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        raise InvalidField(field, f"id {max(ids)} is beyond the vocabulary of {vocab_size}")


def _summary(track: Track, completion_tokens: int, first_at: float) -> Summary:
    job, now = track.job, time.monotonic()
    return Summary(
        request_id=job.request_id,
        adapter_revision=job.adapter.revision if job.adapter else "",
        prompt_tokens=len(job.prompt_ids),
        cached_tokens=track.cached_tokens,
        completion_tokens=completion_tokens,
        queue_s=(track.claimed_at or now) - track.admitted_at,
        adapter_s=track.adapter_ms / 1e3,
        ttft_s=first_at - track.admitted_at,
        decode_s=now - first_at,
        continuations=track.continuations,
        adapters=tuple(
            WeightedAdapter(part.adapter.revision, part.weight) for part in (job.adapter.parts if job.adapter else ())
        ),
    )
