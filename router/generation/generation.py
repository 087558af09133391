"""A request from admission to its last message; read it together with docs/request-life.md."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial

from broker.messages import AdapterRef, Job, StoppingParams
from router.catalog.adapters import check_rank, resolve_adapters
from router.catalog.models import Models, ServedModel
from router.catalog.store_client import StoreClient
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.routed_job import RoutedJob
from router.generation.resume import ResumeClaims, ResumeTokens, Resumption
from router.generation.runs import Run, Runs
from router.generation.slow_clients import SlowClients
from router.output.answers import Answers
from router.request import Message, Received, Request, Summary, WeightedAdapter
from router.text.tokenizer import encode_prompt
from rpc.errors import InvalidField, Mismatch, NotFound, Unavailable

DEFAULT_MAX_TOKENS = 128


class Generation:
    """Runs requests."""

    def __init__(
        self,
        models: Models,
        store: StoreClient,
        dispatcher: Dispatcher,
        reply_to: str,
        tokens: ResumeTokens,
        *,
        client_stall_s: float = math.inf,
    ) -> None:
        self._models = models
        self._store = store
        self._reply_to = reply_to
        self._tokens = tokens
        self._runs = Runs(dispatcher)
        self.slow_clients = SlowClients(client_stall_s)

    def drain(self) -> None:
        """End what runs, and what comes, with UNAVAILABLE: it is resumed elsewhere."""
        self._runs.drain()

    async def run(self, request: Request, deadline_s: float | None) -> AsyncGenerator[Message]:
        """The request's messages, a Summary last. Leaving early stops the work. Raises a CallError."""

        async def make_job() -> Job:
            model = self._models.get(request.model)
            return await self._job(request, model, await self._adapter(request, model), deadline_s)

        if not request.request_id:
            request = replace(request, request_id=secrets.token_hex(8))
        async with self._runs.read(request, None, make_job) as run:
            run.routed.limit(deadline_s)
            async with aclosing(self._messages(request, run, None)) as messages:
                async for message in messages:
                    yield message

    async def resume(
        self, request: Request, token: str, received: Mapping[int, Received], deadline_s: float | None
    ) -> AsyncGenerator[Message]:
        """What comes after what the client has received; as `run` otherwise."""
        claims = self._tokens.verify(token, request.tenant)
        if claims.fingerprint != request.fingerprint:
            raise InvalidField("spec", "is not what the resume_token was given for", reason="RESUME_TOKEN_MISMATCH")
        resumption = Resumption(claims, received)
        request = replace(
            request,
            request_id=claims.request_id,
            seed=claims.seed,
            stopping=replace(request.stopping, max_tokens=claims.max_tokens),
        )

        async def make_job() -> Job:
            return await self._resumed_job(request, resumption, deadline_s)

        if request.best_of == request.n and all(resumption.has(choice).finished for choice in range(request.n)):
            # Nothing is left to compute, only to be told.
            run = Run(request.fingerprint, RoutedJob(await make_job()), AsyncExitStack(), resumption)
            yield Message(_summary(run, sum(len(one.token_ids) for one in received.values())))
            return
        async with self._runs.read(request, resumption, make_job) as run:
            run.routed.limit(deadline_s)
            async with aclosing(self._messages(request, run, received)) as messages:
                async for message in messages:
                    yield message

    def _messages(self, request: Request, run: Run, received: Mapping[int, Received] | None) -> AsyncGenerator[Message]:
        drop = partial(self._runs.drop, run, run.reader)
        return self.slow_clients.watched(self._answered(request, run, received), drop)

    async def _answered(
        self, request: Request, run: Run, received: Mapping[int, Received] | None
    ) -> AsyncGenerator[Message]:
        answers = Answers(request, self._models.get(run.routed.job.model).text, run.routed, received)
        first = True
        async with aclosing(answers.events()) as events:
            async for event in events:
                run.first_at = run.first_at or time.monotonic()
                yield Message(event, self._tokens.sign(_claims_of(run), request.tenant) if first else "")
                first = False
        yield Message(_summary(run, answers.tokens))

    async def _resumed_job(self, request: Request, resumption: Resumption, deadline_s: float | None) -> Job:
        claims = resumption.claims
        try:
            model = self._models.get(claims.model)
        except NotFound as error:  # it was served when the token was given: a router that has just started
            raise Unavailable(f"{claims.model} is not served here yet", reason="NO_MODEL") from error
        if model.manifest.digest != claims.base_digest:
            raise Mismatch("model", f"{claims.model} has been replaced since", reason="BASE_REPLACED")
        check_rank(claims.adapter, self._max_rank(model))
        job = await self._job(request, model, claims.adapter, deadline_s)
        for index, one in enumerate(resumption.received.values()):
            _check_ids(f"received[{index}].token_ids", one.token_ids, model.manifest.vocab_size)
            if len(one.token_ids) > claims.max_tokens:
                raise InvalidField(f"received[{index}].token_ids", f"more than max_tokens ({claims.max_tokens})")
        if request.best_of > request.n:  # nothing of the candidates was delivered
            return replace(job, prompt_logprobs=None)
        return replace(
            job,
            emitted={i: one.token_ids for i, one in resumption.received.items() if one.token_ids and not one.finished},
            done=tuple(sorted(i for i, one in resumption.received.items() if one.finished)),
            prompt_logprobs=None,
        )

    def _max_rank(self, model: ServedModel) -> int | None:
        return max((state.max_rank for state in self._models.serving(model.manifest.name)), default=None)

    async def _adapter(self, request: Request, model: ServedModel) -> AdapterRef | None:
        adapter = await resolve_adapters(request, model.manifest, self._store)
        check_rank(adapter, self._max_rank(model))
        return adapter

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
        return Job(
            # New with every admission: what is still on its way for an older call of that id must not meet this one.
            job_id=f"{request.tenant}/{request.request_id}/{secrets.token_hex(6)}",
            request_id=request.request_id,
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
            traceparent=request.traceparent,
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


def _claims_of(run: Run) -> ResumeClaims:
    job = run.routed.job
    return ResumeClaims(
        request_id=job.request_id,
        fingerprint=run.fingerprint,
        model=job.model,
        base_digest=job.base_digest,
        adapter=job.adapter,
        seed=job.seed,
        max_tokens=job.stopping.max_tokens,
        began=run.began,
        resumes=run.resumes,
    )


def _summary(run: Run, completion_tokens: int) -> Summary:
    job, began = run.routed.job, run.began
    return Summary(
        request_id=job.request_id,
        adapter_revision=job.adapter.revision if job.adapter else "",
        prompt_tokens=len(job.prompt_ids),
        cached_tokens=began.cached_tokens,
        completion_tokens=completion_tokens,
        queue_s=began.queue_s,
        adapter_s=began.adapter_s,
        ttft_s=began.ttft_s,
        # Across routers by the wall clock, which two hosts may disagree on.
        decode_s=max(0.0, time.time() - began.first_at_s),
        continuations=run.resumes + run.routed.continuations,
        adapters=tuple(
            WeightedAdapter(part.adapter.revision, part.weight) for part in (job.adapter.parts if job.adapter else ())
        ),
    )
