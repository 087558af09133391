"""The public gRPC service: calls come in, messages go out.

Before their messages are read, calls are bounded, and what the messages may take:

    accepted ─▶ room for a call? ─▶ a turn to be read ─▶ room for its bytes? ─▶ decoded ─▶ the method, to the call's end
                 └▶ ROUTER_FULL     └▶ MESSAGE_LATE      └▶ ROUTER_FULL         └▶ TOO_MANY_FIELDS

Each bound is shared by the tenants (rpc.shares): one that sends a burst is refused at once and takes no room from
others. Streams that run are never touched.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import Default
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.router.api.convert import (
    check_count,
    check_prompt_size,
    count_numbers,
    count_received,
    read_prompt,
    read_prompt_options,
    read_received,
    read_spec,
    write_message,
)
from loraplex.router.api.encoding import (
    read_classify,
    read_embed,
    write_classification,
    write_embedding,
    write_encode_summary,
)
from loraplex.router.api.request_telemetry import RequestRecord, RequestTelemetry
from loraplex.router.generation.admission import Admission
from loraplex.router.generation.generation import Generation, OnAdmitted
from loraplex.router.generation.unary_calls import ContinuationScore, UnaryCalls, Vector
from loraplex.router.request import EncodeRequest, Message, Request, Stopping, Summary
from loraplex.router.text.chat import tokenizer_config
from loraplex.runtime.rpc.errors import CallError, InvalidField, RateLimits
from loraplex.runtime.rpc.interceptors import Context, Handler, Interceptor, current_call
from loraplex.runtime.rpc.principal import caller, calling_tenant
from loraplex.runtime.rpc.receiving import RECEIVE_S, OneMessage, reading
from loraplex.runtime.rpc.server import MESSAGE_BYTES
from loraplex.runtime.rpc.shares import FairTurns, Shares
from loraplex.runtime.rpc.status import rates_metadata
from loraplex.runtime.tenancy.permissions import ENGINE_SERVICES

# Maximum number of fields of a message, those of the messages in it too; packed numbers count as one. A chat has about
# three for each of its messages. Ten thousand are counted in two to twenty milliseconds, by the lengths of their
# numbers, and decoded in one.
FIELDS = 10_000
# Maximum depth of messages in messages that is counted; decoders refuse deeper ones.
_DEEPEST = 100
# A field's number to its end. Decoders refuse longer ones than 10 bytes, which may be as long as the message.
_NUMBER = re.compile(rb"[\x80-\xff]{0,9}+[\x00-\x7f]")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _ExcessError(Exception):
    """More fields than the maximum; the text is the path of the first one above it."""


def field_in_excess(data: bytes, message: Descriptor, limit: int = FIELDS) -> str:
    """Return the path of the first field above the maximum number in a message's bytes; empty: there is none.

    Counted before decoding, which makes an object of each: a message of 4 MiB may hold two million parts of a chat, and
    would keep the event loop for tens of milliseconds. The format: https://protobuf.dev/programming-guides/encoding/.
    """
    if len(data) <= limit:  # a field has at least a byte
        return ""
    try:
        _count(data, 0, len(data), message, limit, (), _DEEPEST)
    except _ExcessError as excess:
        return str(excess)
    except (IndexError, ValueError):  # the bytes end in the middle of a number, or a number has no end
        return ""
    return ""


def _count(data: bytes, at: int, end: int, message: Descriptor, budget: int, path: tuple[str, ...], depth: int) -> int:
    """Return how many fields may follow those between two places of the bytes.

    Raises _ExcessError; IndexError or ValueError where a number does not end.
    """
    fields = _fields(message)
    while at < end:
        tag = data[at]
        at += 1
        if tag > 127:
            tag, at = _tag_or_size(data, at - 1)
        name, inner = fields.get(tag >> 3, ("", None))
        if not budget:
            raise _ExcessError(".".join((*path, name)) if name else ".".join(path))
        budget -= 1
        kind = tag & 7
        if kind == _BYTES:
            size = data[at]
            at += 1
            if size > 127:
                size, at = _tag_or_size(data, at - 1)
            if inner is not None and depth:
                budget = _count(data, at, min(at + size, end), inner, budget, (*path, name), depth - 1)
            at += size
        elif kind == _VARINT:
            if (number := _NUMBER.match(data, at)) is None:
                raise ValueError("a number without an end")
            at = number.end()
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
    return budget


def _tag_or_size(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a place, and the place behind it.

    Raises IndexError, or ValueError beyond five bytes, which decoders refuse here.
    """
    value = 0
    for shift in range(0, 35, 7):
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError("a tag or a size without an end")


@cache
def _fields(message: Descriptor) -> dict[int, tuple[str, Descriptor | None]]:
    """Return the name of each field, and the message that it holds, by number."""
    return {field.number: (field.name, field.message_type) for field in message.fields}


# The service and the further methods whose calls are bounded: operators and health checks must get through when a
# router is full.
_SERVICE = "/loraplex.inference.v1.InferenceService"
_METHODS = frozenset(f"/{one}/{method}" for one in ENGINE_SERVICES for method in ("Generate", "Embed", "GetTokenizer"))
# Lists of a tenant's jobs, which go through those of all tenants. Without credentials, nobody need name a tenant.
_LISTS = frozenset(f"/loraplex.cluster.v1.ClusterService/{method}" for method in ("ListJobs", "ListDeadJobs"))
# Maximum bytes of a message that is decoded beside others: one of 4 MiB may take 20 ms.
LARGE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class _Method:
    """A bounded method: its name, its requests' type, what decodes their bytes, and whether it needs a tenant."""

    name: str
    message: Descriptor
    decode: Callable[[bytes], Any]
    of_tenant: bool

    def read(self, data: bytes) -> Any:
        """Return the request in a message's bytes. Raises InvalidField."""
        if field := field_in_excess(data, self.message):
            text = f"the message has more than {FIELDS} fields; a list of numbers that is packed counts as one"
            raise InvalidField(field.removeprefix("spec."), text, reason="TOO_MANY_FIELDS")
        return self.decode(data)


class OpenCalls(Interceptor):
    """The open calls of one router: at most `calls`, whose messages have at most `message_bytes` together.

    `refused` is told of each refusal: the method, the tenant if it is known, the error.
    """

    def __init__(
        self,
        calls: int,
        message_bytes: int,
        refused: Callable[[str, str, CallError], None],
        *,
        receive_s: float = RECEIVE_S,
    ) -> None:
        self._calls = Shares(calls)
        self._bytes = Shares(message_bytes)
        self._receiving = OneMessage(MESSAGE_BYTES, receive_s)
        self._turns = FairTurns(1)
        self._refused = refused

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Wrap a method whose calls are bounded; its handler reads the message itself, after the bounds."""
        service, _, name = method.rpartition("/")
        decode = handler.request_deserializer
        if decode is None or (service != _SERVICE and method not in _METHODS | _LISTS):
            return handler
        described = Default().FindMethodByName(f"{service[1:]}.{name}")
        bounded = _Method(name, described.input_type, decode, of_tenant=method not in _LISTS)
        return reading(handler, partial(self._enter, bounded))

    async def _enter(self, method: _Method, context: Context) -> tuple[Any, Callable[[], None]]:
        """Count a call until the client is gone; return its message, and a function that frees the message's bytes.

        Raises a CallError.
        """
        tenant = ""
        try:
            tenant = calling_tenant() if method.of_tenant else caller().tenant
            self._take(self._calls, tenant, 1, "calls")
            # Not at the method's end: a call whose client reads neither answer nor status is open until it leaves.
            current_call().add_done_callback(lambda _: self._calls.give(tenant))
            data = await self._receiving.read(tenant, context)
            self._take(self._bytes, tenant, len(data), "bytes of calls' messages")
            free = partial(self._bytes.give, tenant, len(data))
            try:
                return await self._decode(method, tenant, data), free
            except BaseException:
                free()
                raise
        except CallError as error:
            self._refused(method.name, tenant, error)
            raise

    async def _decode(self, method: _Method, tenant: str, data: bytes) -> Any:
        """Return the request in a message's bytes; of large ones the loop reads one in a pass. Raises InvalidField."""
        if len(data) <= LARGE_BYTES:
            return method.read(data)
        async with self._turns.turn(tenant):
            request = method.read(data)
            await asyncio.sleep(0)
            return request

    def _take(self, shares: Shares, tenant: str, amount: int, what: str) -> None:
        what += " that this router holds open"
        shares.take_or_refuse(tenant, amount, subject=f"tenants/{tenant}/calls", what=what, reason="ROUTER_FULL")


T = TypeVar("T")
# The edge packages that ask questions, and that score documents.
DECISIONS, RERANK = "loraplex.decisions", "loraplex.rerank"
# Maximum continuations of a call.
CONTINUATIONS = 64
# Fields of a request that say how an answer is made: a score has none.
_OF_ANSWERS = frozenset(
    {"sampling", "stopping", "output", "json_schema", "regex", "grammar", "choices", "json_style", "speculation"}
)  # fmt: skip


def check_makes_no_answer(spec: pb.GenerateSpec) -> None:
    """Raise InvalidField where a spec says how an answer is made."""
    for field, _ in spec.ListFields():
        if field.name in _OF_ANSWERS:
            raise InvalidField(field.name, "concerns an answer, and this call makes none; leave it unset")


def read_continuations(request: pb.ScoreRequest) -> list[str | tuple[int, ...]]:
    """Return the continuations: texts, or ids. Raises InvalidField."""
    check_makes_no_answer(request.spec)
    if not 1 <= len(request.continuations) <= CONTINUATIONS:
        count = len(request.continuations)
        raise InvalidField("continuations", f"{count} continuations; give 1 to {CONTINUATIONS}")
    return [_read_continuation(index, one) for index, one in enumerate(request.continuations)]


def _read_continuation(index: int, continuation: pb.Continuation) -> str | tuple[int, ...]:
    match continuation.WhichOneof("continuation"):
        case "text" if continuation.text:
            return continuation.text
        case "token_ids" if continuation.token_ids.ids:
            return tuple(continuation.token_ids.ids)
        case None:
            raise InvalidField(f"continuations[{index}]", "give one of text and token_ids")
        case kind:
            raise InvalidField(f"continuations[{index}].{kind}", "is empty")


def write_scores(scores: Sequence[ContinuationScore], summary: Summary) -> pb.ScoreResponse:
    """Convert the answer of a call."""
    return pb.ScoreResponse(
        scores=[
            pb.ContinuationScore(
                token_ids=score.token_ids, logprobs=score.logprobs, sum=sum(score.logprobs), greedy=score.greedy
            )
            for score in scores
        ],
        adapter_revision=summary.adapter_revision,
        adapters=[pb.WeightedAdapter(adapter=part.adapter, weight=part.weight) for part in summary.adapters],
        usage=pb.Usage(prompt_tokens=summary.prompt_tokens, cached_tokens=summary.cached_tokens),
        request_id=summary.request_id,
    )


# Metadata of a call that asks to hear of its admission, and of the answer that says so. Others get no metadata before
# their first message, so that the policies of their clients may send them again.
ADMITTED_KEY = "x-loraplex-admitted"
# Metadata of the same answer: Summary.not_enforced as JSON, where there is any.
NOT_ENFORCED_KEY = "x-loraplex-not-enforced"


def _announcer(context: Context) -> OnAdmitted | None:
    """Return what tells a call's client that it is admitted; None where it has not asked for that."""
    if ADMITTED_KEY not in dict(context.invocation_metadata() or ()):
        return None

    async def announce(not_enforced: Sequence[str], rates: RateLimits) -> None:
        told = ((NOT_ENFORCED_KEY, json.dumps(not_enforced)),) if not_enforced else ()
        await context.send_initial_metadata(((ADMITTED_KEY, "1"), *told, *rates_metadata(rates)))

    return announce


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves loraplex.inference.v1.InferenceService."""

    def __init__(self, generation: Generation, admission: Admission, telemetry: RequestTelemetry) -> None:
        self.generation = generation
        self.admission = admission
        self.unary_calls = UnaryCalls(generation, admission)
        self.models, self.prompts = admission.models, admission.prompts
        self.telemetry = telemetry

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Stream the answer to a request."""
        with RequestRecord(self.telemetry, context) as record:
            call = record.begin(await read_spec(request.spec, record.tenant, self.models, self.prompts))
            del request  # it may be large, and a stream long
            await self.generation.check_prompt(call)
            answer = self.generation.run(call, context.time_remaining(), on_admitted=_announcer(context))
            async with aclosing(answer) as messages:
                async for message in messages:
                    record.count(message.event)
                    yield await self._write(message, call.tenant, pb.GenerateResponse())

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> AsyncIterator[pb.ResumeResponse]:
        """Stream the rest of an answer whose stream was lost, at this router or another."""
        with RequestRecord(self.telemetry, context) as record:
            call = record.begin(await read_spec(request.spec, record.tenant, self.models, self.prompts))
            payload = await self.generation.verify(call, request.resume_token)
            count = count_received(request.received, call.n, payload.max_tokens)
            received = await self.prompts.run(call.tenant, count, partial(read_received, request.received))
            del request
            rest = self.generation.resume(
                call, payload, received, context.time_remaining(), on_admitted=_announcer(context)
            )
            async with aclosing(rest) as messages:
                async for message in messages:
                    record.count(message.event)
                    yield await self._write(message, call.tenant, pb.ResumeResponse())

    async def _write(self, message: Message, tenant: str, response: Any) -> Any:
        await self.prompts.run(tenant, count_numbers(message.event), partial(write_message, message, response.event))
        return response

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Return the ids of a prompt, as Generate makes them."""
        tenant = calling_tenant()
        check_prompt_size(request, self.models.get(request.model))
        field, prompt = read_prompt(request)
        call = Request(
            tenant,
            prompt,
            field,
            model=request.model,
            adapter=request.adapter,
            stopping=Stopping(max_tokens=0),  # the whole context is the prompt's
            prompt_options=read_prompt_options(request),
        )
        return pb.TokenizeResponse(token_ids=await self.admission.prompt_ids(call))

    async def CountTokens(self, request: pb.CountTokensRequest, context: Context) -> pb.CountTokensResponse:
        """Count the tokens of a prompt as Generate makes them."""
        call = await read_spec(request.spec, calling_tenant(), self.models, self.prompts)
        count = len(await self.admission.prompt_ids(call))
        context_length = self.models.get(call.model).manifest.context_length
        return pb.CountTokensResponse(prompt_tokens=count, context_length=context_length)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Return the log probabilities of continuations of a prompt."""
        with RequestRecord(self.telemetry, context) as record:
            continuations = read_continuations(request)
            call = record.begin(await read_spec(request.spec, record.tenant, self.models, self.prompts))
            del request
            await self.generation.check_prompt(call, continuations)
            scores, summary = await self.unary_calls.score(call, continuations, context.time_remaining())
            record.count(summary)
            context.set_trailing_metadata(rates_metadata(summary.rate_limits))
            return write_scores(scores, summary)

    async def Decide(self, request: pb.DecideRequest, context: Context) -> pb.DecideResponse:
        """Return the probabilities of the answers to questions."""
        return await self._answer(import_module(DECISIONS).decide, request, context)  # type: ignore[no-any-return]

    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResponse:
        """Return how well documents fit a query."""
        return await self._answer(import_module(RERANK).rerank, request, context)  # type: ignore[no-any-return]

    async def _answer(self, answer: Callable[..., Any], request: Any, context: Context) -> Any:
        with RequestRecord(self.telemetry, context) as record:
            response, summary = await answer(self, request, record, context.time_remaining())
            record.count(summary)
            context.set_trailing_metadata(rates_metadata(summary.rate_limits))
            return response

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Return a vector of each text."""
        write = partial(write_embedding, normalize=not request.HasField("normalize") or request.normalize)
        embeddings, summary = await self._encode(partial(read_embed, request), write, context)
        return pb.EmbedResponse(embeddings=embeddings, summary=summary)

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:
        """Return the probabilities of a classifier's labels for each text."""
        found, summary = await self._encode(partial(read_classify, request), write_classification, context)
        classifications = [one for one, _ in found]
        return pb.ClassifyResponse(classifications=classifications, labels=found[0][1], summary=summary)

    async def _encode(
        self, read: Callable[[str], EncodeRequest], write: Callable[[Vector], T], context: Context
    ) -> tuple[list[T], pb.EncodeSummary]:
        with RequestRecord(self.telemetry, context) as record:
            call = record.begin(read(record.tenant))
            await self.generation.check_prompt(call)
            written, summary = await self.unary_calls.encode(call, context.time_remaining(), write)
            record.count_texts(call.task, len(written), summary)
            context.set_trailing_metadata(rates_metadata(summary.rate_limits))
            return written, write_encode_summary(summary)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Return the text of ids."""
        tenant = calling_tenant()
        model = self.models.get(request.model)
        check_count("token_ids", request.token_ids, model.manifest.context_length)
        if request.token_ids and max(request.token_ids) >= model.manifest.vocab_size:
            raise InvalidField("token_ids", f"an id is beyond the vocabulary of {model.manifest.vocab_size}")
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens

        def detokenize() -> pb.DetokenizeResponse:
            return pb.DetokenizeResponse(
                text=model.tokenizer.decode(request.token_ids, skip_special_tokens=skip),
                token_bytes=map(model.tokenizer.bytes_of, request.token_ids) if request.token_bytes else (),
            )

        return await self.prompts.run(tenant, len(request.token_ids), detokenize)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """List the base models that the caller may use."""
        configs, who = {}, caller()
        for m in self.models.allowed if request.tokenizer_config else ():
            tell = partial(tokenizer_config, m.manifest.files, m.tokenizer.chat)
            configs[m.manifest.name] = await self.prompts.in_turn(calling_tenant(), tell)
        return pb.ListModelsResponse(
            tenant=who.tenant,
            caller=who.subject and f"{who.subject} as {', '.join(sorted(who.roles))}",
            models=[
                pb.Model(
                    name=m.manifest.name,
                    digest=m.manifest.digest,
                    context_length=m.manifest.context_length,
                    tasks=m.manifest.tasks,
                    labels=m.manifest.labels,
                    max_rank=max((state.max_rank for state in self.models.serving(m.manifest.name)), default=0),
                    tokenizer_config=configs.get(m.manifest.name, ""),
                )
                for m in self.models.allowed
            ],
        )
