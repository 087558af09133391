"""Decisions: the probabilities of a question's labels from one prefill of its prompt; nothing is generated.

    input + question ──▶ prompt ids ──▶ labels of one token: their log probabilities at the first position of an answer
                                    └─▶ the other labels: scored as continuations, whose prompt the prefix cache has

The first question runs alone, so that the others find the input in the prefix cache, then TEXTS_AT_ONCE of them at
once. Where a row runs does not change its bits, so that a question has the same probabilities alone and among others.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.router.api.convert import read_spec
from loraplex.router.api.request_telemetry import RequestRecord
from loraplex.router.api.service import InferenceService, check_makes_no_answer
from loraplex.router.generation.continuations import continuation_ids
from loraplex.router.generation.unary_calls import (
    CONTINUATIONS_AT_ONCE,
    TEXTS_AT_ONCE,
    ContinuationScore,
    continuation_request,
    countdown,
    name_of,
    run_some_at_once,
    total_of,
    with_revision,
)
from loraplex.router.quotas.quotas import NO_FACTS, CallBudget, Facts, rates_of
from loraplex.router.request import Delta, PromptOptions, Request, Stopping, Summary
from loraplex.runtime.rpc.errors import Internal, InvalidField, Mismatch

# Maximum questions of a call, and labels of a question: those of OpenAI's Decisions API.
QUESTIONS, LABELS = 400, 255
# Variables of a chat template where the caller sets none: a template that reasons would begin with a tag, not a label.
TEMPLATE_ARGS = '{"enable_thinking": false}'


@dataclass(frozen=True, slots=True)
class Question:
    """A question as the prompt has it. `fields` are the paths of its labels in the request."""

    text: str
    labels: tuple[str, ...]
    fields: tuple[str, ...]


def read_questions(request: pb.DecideRequest) -> list[Question]:
    """Return a request's questions. Raises InvalidField."""
    check_makes_no_answer(request.spec)
    if not 1 <= len(request.questions) <= QUESTIONS:
        raise InvalidField("questions", f"{len(request.questions)} questions; give 1 to {QUESTIONS}")
    return [_question(f"questions[{index}]", one) for index, one in enumerate(request.questions)]


def _question(field: str, question: pb.Question) -> Question:
    if not question.instructions.strip():
        raise InvalidField(f"{field}.instructions", "is empty")
    match kind := question.WhichOneof("kind"):
        case "predicate":
            meanings = {"yes": question.predicate.yes, "no": question.predicate.no}
            paths, ask = [f"{field}.predicate.yes", f"{field}.predicate.no"], "Is that so? Answer with one of"
        case "choice" | "score":
            options = (question.choice if kind == "choice" else question.score).options
            if not 2 <= len(options) <= LABELS:
                raise InvalidField(f"{field}.{kind}.options", f"{len(options)} options; give 2 to {LABELS}")
            meanings, paths = {}, []
            for index, option in enumerate(options):
                paths.append(f"{field}.{kind}.options[{index}].value")
                if not option.value.strip():
                    raise InvalidField(paths[-1], "is empty")
                if option.value in meanings:
                    raise InvalidField(paths[-1], f"{option.value!r} is there twice")
                meanings[option.value] = option.description
            ask = (
                "Answer with one of" if kind == "choice" else "Answer with one of these levels, from lowest to highest"
            )
        case _:
            raise InvalidField(field, "give one of predicate, choice and score")
    lines = [f"- {label}: {meaning}" if meaning else f"- {label}" for label, meaning in meanings.items()]
    return Question("\n".join([question.instructions, f"{ask}:", *lines]), tuple(meanings), tuple(paths))


def with_question(spec: pb.GenerateSpec, question: Question) -> tuple[pb.GenerateSpec, list[str]]:
    """Return the spec whose prompt asks a question about the input, and its labels as they go on with the prompt.

    Raises InvalidField where the input is neither a prompt nor a chat.
    """
    asking = pb.GenerateSpec()
    asking.CopyFrom(spec)
    match spec.WhichOneof("input"):
        case "prompt":
            asking.prompt = f"{spec.prompt}\n\n{question.text}\nAnswer:"
            return asking, [f" {label}" for label in question.labels]
        case "chat":
            messages = asking.chat.messages
            if not messages or messages[-1].role != "user":
                messages.add(role="user", content=question.text)
            elif messages[-1].parts:
                messages[-1].parts.add(type="text", text=f"\n\n{question.text}")
            else:
                messages[-1].content += f"\n\n{question.text}"
            asking.chat.template_args = asking.chat.template_args or TEMPLATE_ARGS
            return asking, list(question.labels)
        case _:
            raise InvalidField("prompt", "give a prompt or a chat, which the questions go on with")


@dataclass(frozen=True, slots=True)
class _Asking:
    """A question that may run: its request without the prompt, and the ids of the prompt and of its labels.

    The prompt begins with `shared` ids of the first question's, which are kept once.
    """

    request: Request
    first_ids: tuple[int, ...]
    shared: int
    own_ids: tuple[int, ...]
    labels: Sequence[tuple[int, ...]]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Return the ids of its prompt."""
        return (*self.first_ids[: self.shared], *self.own_ids)

    @property
    def scored(self) -> list[int]:
        """Return which labels are continuations."""
        return [index for index, ids in enumerate(self.labels) if len(ids) > 1]

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens of its jobs."""
        prompt = self.shared + len(self.own_ids)
        scored = [prompt + len(self.labels[index]) for index in self.scored]
        return sum(scored) + prompt * (len(scored) < len(self.labels))


def _check_labels(question: Question, labels: Sequence[tuple[int, ...]]) -> None:
    """Raise InvalidField where a label's tokens begin another's: its probability would be a part of the other's."""
    for (shorter, first), (longer, second) in pairwise(sorted(zip(labels, range(len(labels)), strict=True))):
        if longer[: len(shorter)] == shorter:
            begun, beginning = question.labels[second], question.labels[first]
            message = f"its tokens begin with those of {beginning!r}, which is a label too; word {begun!r} otherwise"
            raise InvalidField(question.fields[second], message)


async def _temperature(service: InferenceService, tenant: str, facts: Facts) -> float:
    """Return the temperature of the revision that answers. Raises InvalidField, Mismatch where it has none."""
    revision = facts.adapter_revision
    if "/revisions/" not in revision:
        raise InvalidField("calibrated", "only adapters have calibrations: name one adapter, or leave calibrated unset")
    resolved = await service.admission.store.resolve(tenant, name_of(revision))
    quantization = service.models.get(facts.model).manifest.quantization
    temperature = resolved.temperatures.get(quantization)
    if temperature is None:
        base = f" on {facts.model}, whose weights are {quantization}" if quantization else ""
        message = f"has no calibration{base}; run `loraplex adapters calibrate`, or leave calibrated unset"
        raise Mismatch(revision, message, reason="NO_CALIBRATION")
    return temperature


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the number of ids that both begin with."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


class _Call:
    """Prepares the questions of one call, and asks them within its deadline."""

    def __init__(self, service: InferenceService, deadline_s: float | None) -> None:
        self._service = service
        self._left_s = countdown(deadline_s)

    async def prepare(
        self, spec: pb.GenerateSpec, questions: Sequence[Question], record: RequestRecord
    ) -> tuple[list[_Asking], Facts]:
        """Return what each question asks and the call's facts, before anything is queued. Raises a CallError."""
        service, prepared, facts = self._service, list[_Asking](), NO_FACTS
        request_id = spec.request_id or secrets.token_hex(8)
        for index, question in enumerate(questions):
            asking, labels = with_question(spec, question)
            request = await read_spec(asking, record.tenant, service.models, service.prompts)
            request = replace(request, request_id=request_id, session_id=request.session_id or request_id)
            traced = prepared[0].request if prepared else record.begin(request)
            request = replace(request, traceparent=traced.traceparent)
            try:
                prompt_ids, ids, model, revision = await continuation_ids(service.admission, request, labels)
            except InvalidField as error:
                place = error.field.removeprefix("continuations[").removesuffix("]")
                if not place.isdigit():
                    raise
                raise InvalidField(question.fields[int(place)], error.message.partition(": ")[2]) from error
            _check_labels(question, ids)
            facts = Facts(request_id=request_id, model=model, adapter_revision=revision)
            if not prepared:
                first_prompt, first_ids = request.prompt, prompt_ids
            shared = _shared(first_ids, prompt_ids)
            kept = replace(request, request_id=f"{request_id}.{index}", prompt=())
            prepared.append(_Asking(kept, first_ids, shared, prompt_ids[shared:], ids))
        # The input with the first question; the others go on with the same input.
        first = replace(prepared[0].request, prompt=first_prompt)
        await service.generation.check_prompt(first, [question.text for question in questions[1:]])
        return prepared, facts

    async def ask(self, asking: _Asking, budget: CallBudget | None) -> tuple[list[float], Summary]:
        """Return the log probabilities of a question's labels and what they took."""
        logprobs, summaries, request = dict[int, float](), list[Summary](), asking.request
        prompt_ids = asking.prompt_ids
        read = [index for index, ids in enumerate(asking.labels) if len(ids) == 1]
        if read:
            ids = tuple(asking.labels[index][0] for index in read)
            found, summary = await first_logprobs(self._service, request, prompt_ids, ids, self._left_s(), budget)
            logprobs |= zip(read, found, strict=True)
            summaries.append(summary)
        scored = asking.scored
        while scored:  # the first alone, where none was read
            first, scored = (scored[:1], scored[1:]) if not summaries else (scored, [])
            request = with_revision(request, summaries[0]) if summaries else request
            parts = [continuation_request(request, index, prompt_ids, asking.labels[index]) for index in first]
            runs = [partial(self._score, part, budget) for part in parts]
            for index, (score, summary) in zip(first, await run_some_at_once(runs, CONTINUATIONS_AT_ONCE), strict=True):
                logprobs[index] = sum(score.logprobs)
                summaries.append(summary)
        ordered = [logprobs[index] for index in range(len(asking.labels))]
        return ordered, total_of(asking.request.request_id, summaries)

    async def _score(self, part: Request, budget: CallBudget | None) -> tuple[ContinuationScore, Summary]:
        """Return the score of a label, within what is left of the deadline when it begins."""
        return await self._service.unary_calls.score_part(part, self._left_s(), budget)


async def first_logprobs(
    service: InferenceService,
    request: Request,
    prompt_ids: tuple[int, ...],
    ids: tuple[int, ...],
    deadline_s: float | None,
    budget: CallBudget | None,
) -> tuple[list[float], Summary]:
    """Return the log probabilities of ids at the first position of an answer to a prompt, and what it took.

    Raises a CallError.
    """
    of_ids = array("I", (*prompt_ids, *ids)).tobytes()
    part = replace(
        request,
        prompt=prompt_ids,
        prompt_options=PromptOptions(),
        stopping=Stopping(max_tokens=1),
        logprobs=len(ids),
        logprob_token_ids=ids,
        # The message's fingerprint is of the whole call.
        fingerprint=hashlib.sha256(f"{request.fingerprint} {len(ids)} ".encode() + of_ids).hexdigest(),
    )
    logprobs: list[float] = []
    async with aclosing(service.generation.run(part, deadline_s, part_of=budget)) as messages:
        async for message in messages:
            match message.event:
                case Delta(logprobs=(first, *_)):
                    logprobs = [logprob for _, logprob in first.alternatives]
                case Summary() as summary if logprobs:
                    return logprobs, summary
    raise Internal("a prompt ended without the log probabilities of its labels", reason="NO_LOGPROBS")


def _decision(logprobs: Sequence[float], temperature: float, scored: int) -> pb.Decision:
    """Return the decision of labels with these log probabilities: their softmax at the temperature."""
    most = max(logprobs)  # against an underflow where all are unlikely
    shares = [math.exp((one - most) / temperature) for one in logprobs]
    total = sum(shares)
    return pb.Decision(
        probabilities=[share / total for share in shares],
        label_mass=min(1.0, sum(math.exp(one - most) for one in logprobs) * math.exp(most)),
        scored_labels=scored,
        logprobs=logprobs,
    )


async def decide(
    service: InferenceService, request: pb.DecideRequest, record: RequestRecord, deadline_s: float | None
) -> tuple[pb.DecideResponse, Summary]:
    """Return the decisions of a request and the summary of all. Raises a CallError."""
    call = _Call(service, deadline_s)
    prepared, facts = await call.prepare(request.spec, read_questions(request), record)
    # Refused before anything is queued.
    temperature = await _temperature(service, record.tenant, facts) if request.calibrated else None
    prompt_tokens = sum(one.prompt_tokens for one in prepared)
    async with service.generation.reserved(record.tenant, facts, prompt_tokens) as budget:
        first = await call.ask(prepared[0], budget)
        others = [replace(one, request=with_revision(one.request, first[1])) for one in prepared[1:]]
        asked = [first, *await run_some_at_once([partial(call.ask, one, budget) for one in others], TEXTS_AT_ONCE)]
    summary = replace(total_of(facts.request_id, [summary for _, summary in asked]), rate_limits=rates_of(budget))
    if request.calibrated and summary.adapter_revision != facts.adapter_revision:  # a rollout has just moved
        facts = replace(facts, adapter_revision=summary.adapter_revision)
        temperature = await _temperature(service, record.tenant, facts)
    response = pb.DecideResponse(
        decisions=[
            _decision(logprobs, temperature or 1.0, len(one.scored))
            for one, (logprobs, _) in zip(prepared, asked, strict=True)
        ],
        adapter_revision=summary.adapter_revision,
        adapters=[pb.WeightedAdapter(adapter=part.adapter, weight=part.weight) for part in summary.adapters],
        usage=pb.Usage(prompt_tokens=summary.prompt_tokens, cached_tokens=summary.cached_tokens),
        request_id=summary.request_id,
        temperature=temperature,
    )
    return response, summary
