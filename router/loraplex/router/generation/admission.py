"""Admission: a request becomes a job. Names become digests, the prompt becomes ids, limits are checked."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from loraplex.contracts.artifacts.added_tokens import eos_token
from loraplex.contracts.artifacts.generation_config import GenerationConfig
from loraplex.contracts.broker.messages import AdapterRef, Job, WorkerState
from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.matching import special_tokens
from loraplex.contracts.grammars.prover import Prover, ProverBusyError
from loraplex.contracts.options import Encode, SamplingParams, StoppingParams
from loraplex.router.catalog.adapters import (
    WRONG_TASK,
    AdapterConfigs,
    Classifier,
    check_generates,
    check_rank,
    find_classifier,
    resolve_adapters,
)
from loraplex.router.catalog.models import Models, ServedModel
from loraplex.router.catalog.store_client import Manifest, StoreClient
from loraplex.router.dispatch.links import RelayReach
from loraplex.router.generation.chat_format import CallGrammar, call_grammar, chat_format, grammar_field, tool_calls
from loraplex.router.generation.chat_reader import ChatFormat
from loraplex.router.generation.resume import Resumption
from loraplex.router.generation.rollouts import Side, choose_side
from loraplex.router.generation.run import Run
from loraplex.router.request import DEFAULT_MAX_TOKENS, Chat, EncodeRequest, PromptOptions, Request
from loraplex.router.text.tokenizer import PromptTokenizer, bad_word_ids, context_exceeded, find_invocation
from loraplex.runtime.rpc.errors import InvalidField, Mismatch, Unavailable
from loraplex.runtime.rpc.server import MESSAGE_BYTES
from loraplex.runtime.rpc.shares import FairThreads

# Maximum bytes of a message's other fields: the resume token, the numbers of choice and offset.
_REST_BYTES = 64 * 1024
# Maximum bytes of a token's id, of its own log probability and of an alternative, in a message.
_ID_BYTES = 5
_LOGPROB_BYTES = 9
_ALTERNATIVE_BYTES = 13
# Maximum bytes of a token's text, on average over a whole answer.
_TEXT_BYTES = 128


def check_answer_size(request: Request, prompt: int, max_tokens: int) -> None:
    """Raise InvalidField if a part of the answer exceeds one message; `prompt` is the number of its tokens.

    Such parts are the prompt's log probabilities, and the best of several candidates: others come in several messages.
    """
    if request.prompt_logprobs is not None:
        _check("output.prompt_logprobs", request.prompt_logprobs, prompt - request.prompt_logprobs_start, 0)
    if request.best_of > request.n:
        others = _ID_BYTES + _TEXT_BYTES
        if request.logprobs is not None:
            _check("output.logprobs", request.logprobs, max_tokens, others)
        elif max_tokens > (most := (MESSAGE_BYTES - _REST_BYTES) // others):
            message = f"{max_tokens} tokens of the best candidate do not fit a message; at most {most} do"
            raise InvalidField("stopping.max_tokens", message, reason=_TOO_LARGE)


def _check(field: str, alternatives: int, tokens: int, others: int) -> None:
    """Check the log probabilities of so many tokens, of `others` bytes each without them."""
    # Below 0: not even the token's own log probability fits.
    most = ((MESSAGE_BYTES - _REST_BYTES) // max(1, tokens) - _LOGPROB_BYTES - others) // _ALTERNATIVE_BYTES
    if alternatives > most:
        each = f"{alternatives} for each of {tokens} tokens do not fit a message; at most {most} do"
        none = f"those of {tokens} tokens do not fit a message; leave it out"
        raise InvalidField(field, each if most >= 0 else none, reason=_TOO_LARGE)


_TOO_LARGE = "ANSWER_TOO_LARGE"


class GrammarProofs:
    """Proves that grammars compile, before their jobs cost a place in the queue; each once for a tenant, in turns.

    The child process that proves them (grammars.prover) is started with the first request that has a format.
    """

    def __init__(self) -> None:
        # By the digest of the base model.
        self._provers: dict[str, Prover] = {}
        self._thread = FairThreads(1, "grammar-proofs")

    async def check(self, grammar: str, field: str, tenant: str, model: Manifest) -> None:
        """Raise InvalidField, naming `field`, for a grammar that the model's workers would refuse."""
        if model.architecture == "hash" and model.digest not in self._provers:
            self._provers[model.digest] = Prover(model.vocab_size, {})
        prover = self._provers.get(model.digest)
        try:
            if prover is not None and prover.known(grammar, tenant):
                prover.prove(grammar, field, tenant)
            else:
                await self._thread.run(tenant, partial(self._prove, tenant, grammar, field, model))
        except GrammarError as error:
            raise InvalidField(error.path, error.message, reason="INVALID_FORMAT") from error
        except ProverBusyError as error:
            raise Unavailable(f"{field}: could not be checked in time", reason="FORMAT_NOT_CHECKED") from error

    def _prove(self, tenant: str, grammar: str, field: str, model: Manifest) -> None:
        if model.digest not in self._provers:
            if "tokenizer.json" not in model.files:
                raise GrammarError(field, "the model has no tokenizer.json, without which it serves no formats")
            special = special_tokens(model.files["tokenizer.json"])
            self._provers[model.digest] = Prover(model.vocab_size, special)
        self._provers[model.digest].prove(grammar, field, tenant)

    def forget(self) -> int:
        """Forget all proofs; returns how many there were."""
        return sum(prover.forget() for prover in self._provers.values())

    def close(self) -> None:
        """End the child processes."""
        for prover in self._provers.values():
            prover.close()
        self._thread.close()


def unset_values(request: Request, config: GenerationConfig) -> dict[str, Any]:
    """Return a model's values for the fields of sampling that a request leaves unset.

    They are penalties alone where the request sets temperature 0, and none where it asks for no tokens.
    """
    if request.stopping.max_tokens == 0:
        return {}
    greedy = "temperature" in request.sampling_set and request.sampling.temperature == 0
    values = replace(config, do_sample=False).sampling if greedy else config.sampling
    return {name: value for name, value in values.items() if name not in request.sampling_set}


@dataclass(eq=False)
class Admission:
    """Admits the requests of one router, which workers reach at `reply_to`: resolve, tokenize, check, make the job."""

    models: Models
    store: StoreClient
    configs: AdapterConfigs
    reply_to: str
    reach: RelayReach
    prompts: PromptTokenizer
    proofs: GrammarProofs = field(default_factory=GrammarProofs)

    async def side_of(self, request: Request) -> Side | None:
        """Return a request's side of the rollout of its adapter, if there is one. Raises as `admit` does."""
        key = request.session_id or request.request_id
        if not (request.adapter and key):
            return None
        self.models.get(request.model)
        side = choose_side(await self.store.resolve(request.tenant, request.adapter), key)
        if side is not None and (request.grammar or request.echo):  # the request itself says how the answer begins
            return replace(side, refusal_phrases=())
        return side

    async def admit(self, request: Request, deadline_s: float | None, side: Side | None = None) -> Run:
        """Admit a new request. Raises a CallError where it can't be served."""
        model, adapter, context = await self.adapted(request, side)
        # Here alone: whoever goes on with the request has the values in its job, or in its resume token.
        filled = unset_values(request, model.generation_config)
        request = replace(request, sampling=replace(request.sampling, **filled))
        run = await self._admit(request, model, adapter, context, deadline_s)
        run.filled = filled
        if run.job.grammar:
            await self._prove(run, model)
        check_answer_size(request, len(run.job.prompt_ids), run.job.stopping.max_tokens)
        if side is not None and side.shadow is not None and request.logprobs is None:
            # The two answers' log probabilities are compared.
            run.job = replace(run.job, logprobs=0)
        return run

    async def _prove(self, run: Run, model: ServedModel) -> None:
        """Give a request a grammar that compiles, for which tools that are not strict may lose their schemas.

        Raises InvalidField.
        """
        request = run.request
        chat = request.prompt if isinstance(request.prompt, Chat) and request.prompt.tools else None
        if chat and request.grammar:
            await self.proofs.check(request.grammar, request.format_field, request.tenant, model.manifest)
        while True:
            try:
                field = "chat.tools" if chat else grammar_field(request)
                return await self.proofs.check(run.job.grammar, field, request.tenant, model.manifest)
            except InvalidField as error:
                if chat is None:
                    raise
                free = tool_calls().free_parts(chat, run.calls.free, error)
            _, run.calls = await self._formats(request, model, run.job.prompt_ids, free)
            run.job = replace(run.job, grammar=run.calls.text)

    async def readmit(self, request: Request, resumption: Resumption, deadline_s: float | None) -> Run:
        """Admit a request that goes on after the received tokens, with what it was resolved to at first.

        Raises a CallError where it can't be served any more.
        """
        payload = resumption.payload
        model = self.models.with_digest(payload.model, payload.base_digest)
        model = await self._as_adapted(model, request.tenant, payload.adapter)
        request = replace(request, sampling=replace(request.sampling, **payload.filled))
        context = model.manifest.context_length
        run = await self._admit(request, model, payload.adapter, context, deadline_s, payload.free_parts)
        job = replace(run.job, resumed=True, prompt_logprobs=None)
        if unservable := self.models.why_unservable(job):  # it was admitted: a worker that fits may be restarting
            raise unservable
        check = partial(_check_received, resumption, model.manifest.vocab_size)
        await self.prompts.run(job.tenant, resumption.received_tokens, check)
        if request.best_of == request.n:  # of more candidates nothing was delivered
            received = resumption.received.items()
            emitted = {choice: part.token_ids for choice, part in received if part.token_ids and not part.finished}
            job = replace(
                job, emitted=emitted, done=tuple(sorted(choice for choice, part in received if part.finished))
            )
        run.job, run.filled, run.resumption = job, payload.filled, resumption
        return run

    async def admit_texts(self, request: EncodeRequest) -> tuple[Sequence[Job], Classifier]:
        """Return the jobs of a request's inputs, in order, all of one revision, and the classifier that they ask for.

        Raises a CallError where any input can't be served.
        """
        model, adapter, context = await self.adapted(request)
        manifest = model.manifest
        classifier = await find_classifier(request, manifest, adapter, self.configs)
        if model.invocation:
            name = adapter.revision if adapter else manifest.name
            raise Mismatch(name, "is an activated adapter, which generates alone; call Generate", reason=WRONG_TASK)
        inputs = await self.prompts.tokenize_inputs(model.tokenizer, request, context)
        for (ids, _), path in zip(inputs, request.fields, strict=True):
            if not ids:
                raise InvalidField(path, "has no tokens")
            check_ids(path, ids, manifest.vocab_size)
        request = replace(request, request_id=request.request_id or secrets.token_hex(8))
        job = self._job(request, manifest, adapter, (), StoppingParams(max_tokens=0))
        encodes = [Encode(request.task, request.pooling, pair_tokens) for _, pair_tokens in inputs]
        jobs = [
            replace(job, job_id=f"{job.job_id}.{index}", prompt_ids=ids, encode=encode)
            for index, ((ids, _), encode) in enumerate(zip(inputs, encodes, strict=True))
        ]
        return jobs, classifier

    async def adapted(
        self, request: Request | EncodeRequest, side: Side | None = None
    ) -> tuple[ServedModel, AdapterRef | None, int]:
        """Return the model as its adapter changes it, the adapter, and a job's maximum tokens. Raises a CallError."""
        model, adapter = await self.resolve(request, side)
        return model, adapter, _context(model.manifest, adapter, self._workers_for_new_jobs(model.manifest))

    async def prompt_ids(self, request: Request) -> tuple[int, ...]:
        """Return the ids of a request's prompt, as its job would have them. Raises a CallError."""
        model, _ = await self.resolve(request, await self.side_of(request))
        prompt_ids = await self._tokenize(request, model)
        check_ids(request.prompt_field, prompt_ids, model.manifest.vocab_size)
        return prompt_ids

    async def resolve(
        self, request: Request | EncodeRequest, side: Side | None = None
    ) -> tuple[ServedModel, AdapterRef | None]:
        """Return the revision of the base model, as its adapter changes it, and the adapter of a new request."""
        revisions = self.models.revisions(self.models.get(request.model).manifest.name)
        chosen = side.resolved if side is not None else None
        manifest, adapter = await resolve_adapters(request, [one.manifest for one in revisions], self.store, chosen)
        model = next(one for one in revisions if one.manifest is manifest)
        return await self._as_adapted(model, request.tenant, adapter), adapter

    async def _as_adapted(self, model: ServedModel, tenant: str, adapter: AdapterRef | None) -> ServedModel:
        """Return the model as an adapter's settings change it: its tokens, ends, template and default max_tokens.

        Raises PermissionDenied where the caller's plans do not allow the two.
        """
        if refusal := self.models.refusal(model.manifest.name, adapter):
            raise refusal
        settings = await self.configs.of(tenant, adapter)
        tokenizer, config = model.tokenizer.with_tokens(settings.tokens), model.generation_config
        ends = (tokenizer.added_token(end) if isinstance(end, str) else end for end in settings.ends)
        return replace(
            model,
            tokenizer=tokenizer,
            template=tokenizer.chat.with_settings(settings.chat, eos_token(settings.ends)),
            end_ids=tuple(end for end in ends if end is not None and end < model.manifest.vocab_size),
            invocation=settings.invocation,
            generation_config=replace(config, max_new_tokens=settings.max_tokens or config.max_new_tokens),
        )

    async def _admit(
        self,
        request: Request,
        model: ServedModel,
        adapter: AdapterRef | None,
        context: int,
        deadline_s: float | None,
        free: Collection[str] = (),
    ) -> Run:
        """Admit a request to the model and adapter that it was resolved to; `context`: maximum tokens of its job."""
        check_generates(model.manifest)
        prompt_ids = await self._tokenize(request, model)
        check_ids(request.prompt_field, prompt_ids, model.manifest.vocab_size)
        invoked_at, inactive = None, None
        if ids := model.invocation:
            find = partial(find_invocation, model.tokenizer, ids, prompt_ids[: request.scored_from], request)
            invoked_at = await self.prompts.run(request.tenant, len(prompt_ids), find)
            inactive = adapter if invoked_at is None else None
        answer_format, calls = await self._formats(request, model, prompt_ids, free)
        for name, given in (
            ("allowed_token_ids", request.sampling.allowed_token_ids),
            ("bad_words", request.bad_words),
        ):
            if calls.text and given:
                raise InvalidField(f"sampling.{name}", f"cannot be used with {grammar_field(request)}")
        sampling = await self._sampling(request, model)
        self._workers_for_new_jobs(model.manifest)
        max_tokens = _max_tokens(request, len(prompt_ids), context, model)
        for path, ids in (
            ("stopping.stop_token_ids", request.stopping.stop_token_ids),
            ("sampling.logit_bias", tuple(token_id for token_id, _ in request.sampling.logit_bias)),
            ("sampling.allowed_token_ids", request.sampling.allowed_token_ids),
            ("output.logprob_token_ids", request.logprob_token_ids),
        ):
            check_ids(path, ids, model.manifest.vocab_size)
        stopping = StoppingParams(
            max_tokens,
            min(request.stopping.min_tokens, max_tokens),
            request.stopping.stop_token_ids,
            request.stopping.ignore_eos,
            model.end_ids,
        )
        job = replace(
            self._job(request, model.manifest, None if inactive else adapter, prompt_ids, stopping),
            sampling=sampling,
            n=request.best_of,
            # Candidates are ranked by their log probabilities.
            logprobs=0 if request.logprobs is None and request.best_of > request.n else request.logprobs,
            logprob_token_ids=request.logprob_token_ids,
            prompt_logprobs=request.prompt_logprobs,
            prompt_logprobs_start=request.prompt_logprobs_start,
            deadline_ms=0 if deadline_s is None else max(1, round(deadline_s * 1e3)),
            grammar=calls.text,
            speculate=request.speculate,
            invoked_at=invoked_at,
        )
        return Run(request, job, model.tokenizer, answer_format, calls=calls, inactive=inactive)

    async def _tokenize(self, request: Request, model: ServedModel) -> tuple[int, ...]:
        prompt, tenant, context = request.prompt, request.tenant, model.manifest.context_length
        default = model.default_max_tokens(request.stopping.default_max_tokens)
        options = _resolved(request, context, default)
        if isinstance(prompt, Chat):
            now = request.rendered_at_s or time.time()
            return await self.prompts.tokenize_chat(
                model.tokenizer, model.template, prompt, tenant, context, now, options
            )
        return await self.prompts.tokenize(model.tokenizer, prompt, request.prompt_field, tenant, context, options)

    async def _sampling(self, request: Request, model: ServedModel) -> SamplingParams:
        """Return a request's sampling with its seed, and the token sequences of its bad words. Raises InvalidField."""
        seed = secrets.randbits(63) if request.seed is None else request.seed
        if not request.bad_words:
            return replace(request.sampling, seed=seed)
        make = partial(bad_word_ids, model.tokenizer, request.bad_words)
        found = await self.prompts.run(request.tenant, sum(map(len, request.bad_words)), make)
        check_ids("sampling.bad_words", tuple(chain.from_iterable(found)), model.manifest.vocab_size)
        return replace(request.sampling, seed=seed, bad_word_ids=found)

    async def _formats(
        self,
        request: Request,
        model: ServedModel,
        prompt_ids: tuple[int, ...],
        free: Collection[str] = (),
    ) -> tuple[ChatFormat | None, CallGrammar]:
        """Return how to read the answer to a chat, and the grammar that the answer keeps to."""
        if not isinstance(request.prompt, Chat):
            return None, CallGrammar(request.grammar)
        chat, tokenizer, template = request.prompt, model.tokenizer, model.template

        def make() -> tuple[ChatFormat | None, CallGrammar]:
            form = chat_format(chat, template, tokenizer, prompt_ids, request.request_id)
            answer = request.grammar
            return form, call_grammar(chat, template, tokenizer, prompt_ids, request.tenant, free, answer)

        if chat.tools:  # the schemas of many take tens of milliseconds
            return await self.prompts.in_turn(request.tenant, make)
        # To continue a message, the whole prompt is read; otherwise its end alone, which takes no time.
        return await self.prompts.run(request.tenant, len(prompt_ids) if chat.continue_final_message else 0, make)

    def _job(
        self,
        request: Request | EncodeRequest,
        manifest: Manifest,
        adapter: AdapterRef | None,
        prompt_ids: tuple[int, ...],
        stopping: StoppingParams,
    ) -> Job:
        """Return the job of a request, with what all kinds of requests have."""
        return Job(
            # New with every admission: messages about an older call of this request id must not reach this job.
            job_id=f"{request.tenant}/{request.request_id}/{secrets.token_hex(6)}",
            request_id=request.request_id,
            tenant=request.tenant,
            model=manifest.name,
            base_digest=manifest.digest,
            reply_to=self.reply_to,
            adapter=adapter,
            prompt_ids=prompt_ids,
            stopping=stopping,
            priority=request.priority,
            traceparent=request.traceparent,
        )

    def _workers_for_new_jobs(self, manifest: Manifest) -> list[WorkerState]:
        """Return the workers that take new jobs of a base model. Raises Unavailable where there is none in reach.

        There may be none where one was there a moment ago, or the scaler starts one for jobs that wait.
        """
        serving = self.models.serving(manifest.name, manifest.digest)
        if not serving and not self.models.expects_worker(manifest.name, manifest.digest):
            raise Unavailable(f"no worker serves {manifest.name} now", reason="NO_WORKER")
        self.reach.check(manifest.name)
        return serving


def _context(manifest: Manifest, adapter: AdapterRef | None, workers: Sequence[WorkerState]) -> int:
    """Return the maximum tokens of a job. Raises a CallError where no worker takes the adapter."""
    check_rank(adapter, max((state.max_rank for state in workers), default=None))
    # A job that is longer than every worker's KV cache would wait for ever.
    largest = max((state.max_tokens for state in workers), default=manifest.context_length)
    return min(manifest.context_length, largest)


def _resolved(request: Request, context: int, default: int) -> PromptOptions:
    """Return the prompt's options, with `truncate_to` 0 as what the context leaves beside the answer.

    Beside one without max_tokens, for which a model may propose its whole context, DEFAULT_MAX_TOKENS at most.
    """
    if request.prompt_options.truncate_to != 0:
        return request.prompt_options
    asked = request.stopping.max_tokens
    is_open = asked is None or (request.stopping.cap_max_tokens and asked >= context)
    answer = min(default, DEFAULT_MAX_TOKENS) if asked is None or is_open else asked
    return replace(request.prompt_options, truncate_to=max(1, context - answer))


def _max_tokens(request: Request, prompt: int, context: int, model: ServedModel) -> int:
    if prompt == 0:
        raise InvalidField(request.prompt_field, "has no tokens")
    remaining = context - prompt
    asked, caps = request.stopping.max_tokens, request.stopping.cap_max_tokens
    least = 1 if asked is None else min(asked, 1) if caps else asked
    if least > remaining:
        field = request.prompt_field if remaining < 1 else "stopping.max_tokens"
        raise context_exceeded(field, f"{prompt} prompt tokens and {least} more", context)
    return min(model.default_max_tokens(request.stopping.default_max_tokens) if asked is None else asked, remaining)


def _check_received(resumption: Resumption, vocab_size: int) -> None:
    for index, part in enumerate(resumption.received.values()):
        check_ids(f"received[{index}].token_ids", part.token_ids, vocab_size)


def check_ids(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise InvalidField where the model has no such id."""
    if ids and max(ids) >= vocab_size:
        raise InvalidField(field, f"id {max(ids)} is beyond the vocabulary of {vocab_size}")
