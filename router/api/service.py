"""The public gRPC service: calls come in, messages go out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial

from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from router.api.convert import (
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
from router.api.encoding import (
    read_classify,
    read_embed,
    write_classification,
    write_embedding,
    write_encode_summary,
)
from router.api.request_telemetry import RequestTelemetry
from router.generation.admission import Admission
from router.generation.generation import Generation
from router.generation.unary_calls import ContinuationScore, UnaryCalls
from router.request import Message, Request, Stopping, Summary
from rpc.errors import InvalidField
from rpc.interceptors import Context
from rpc.principal import calling_tenant

# Maximum continuations of a call.
CONTINUATIONS = 64
# Fields of a request that say how an answer is made: a score has none.
_OF_ANSWERS = frozenset(
    {"sampling", "stopping", "output", "json_schema", "regex", "grammar", "choices", "json_style"}
)  # fmt: skip


def read_continuations(request: pb.ScoreRequest) -> list[str | tuple[int, ...]]:
    """Return the continuations: texts, or ids. Raises InvalidField."""
    for field, _ in request.spec.ListFields():
        if field.name in _OF_ANSWERS:
            raise InvalidField(field.name, "concerns an answer, and Score makes none; leave it unset")
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


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves loraplex.inference.v1.InferenceService."""

    def __init__(self, generation: Generation, admission: Admission, telemetry: RequestTelemetry) -> None:
        self.generation = generation
        self._admission = admission
        self.unary_calls = UnaryCalls(generation, admission)
        self.models, self.prompts = admission.models, admission.prompts
        self.telemetry = telemetry

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Stream the answer to a request."""
        with self.telemetry.new_record(context) as record:
            call = record.begin(await read_spec(request.spec, record.tenant, self.models, self.prompts))
            del request  # it may be large, and a stream long
            async with aclosing(self.generation.run(call, context.time_remaining())) as messages:
                async for message in messages:
                    record.count(message.event)
                    yield pb.GenerateResponse(event=await self._write(message, call.tenant))

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> AsyncIterator[pb.ResumeResponse]:
        """Stream the rest of an answer whose stream was lost, at this router or another."""
        with self.telemetry.new_record(context) as record:
            call = record.begin(await read_spec(request.spec, record.tenant, self.models, self.prompts))
            claims = await self.generation.verify(call, request.resume_token)
            count = count_received(request.received, call.n, claims.max_tokens)
            received = await self.prompts.run(call.tenant, count, partial(read_received, request.received))
            del request
            rest = self.generation.resume(call, claims, received, context.time_remaining())
            async with aclosing(rest) as messages:
                async for message in messages:
                    record.count(message.event)
                    yield pb.ResumeResponse(event=await self._write(message, call.tenant))

    async def _write(self, message: Message, tenant: str) -> pb.GenerateEvent:
        return await self.prompts.run(tenant, count_numbers(message.event), partial(write_message, message))

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
        return pb.TokenizeResponse(token_ids=await self._admission.prompt_ids(call))

    async def CountTokens(self, request: pb.CountTokensRequest, context: Context) -> pb.CountTokensResponse:
        """Count the tokens of a prompt as Generate makes them."""
        call = await read_spec(request.spec, calling_tenant(), self.models, self.prompts)
        count = len(await self._admission.prompt_ids(call))
        context_length = self.models.get(call.model).manifest.context_length
        return pb.CountTokensResponse(prompt_tokens=count, context_length=context_length)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Return the log probabilities of continuations of a prompt."""
        with self.telemetry.new_record(context) as record:
            continuations = read_continuations(request)
            call = record.begin(await read_spec(request.spec, record.tenant, self.models, self.prompts))
            del request
            scores, summary = await self.unary_calls.score(call, continuations, context.time_remaining())
            record.count(summary)
            return write_scores(scores, summary)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Return a vector of each text."""
        with self.telemetry.new_record(context) as record:
            call = record.begin(read_embed(request, record.tenant))
            normalize = not request.HasField("normalize") or request.normalize
            write = partial(write_embedding, normalize=normalize)
            embeddings, summary = await self.unary_calls.encode(call, context.time_remaining(), write)
            record.count_texts("embed", len(embeddings), summary)
            return pb.EmbedResponse(embeddings=embeddings, summary=write_encode_summary(summary))

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:
        """Return the probabilities of a classifier's labels for each text."""
        with self.telemetry.new_record(context) as record:
            call = record.begin(read_classify(request, record.tenant))
            found, summary = await self.unary_calls.encode(call, context.time_remaining(), write_classification)
            record.count_texts("classify", len(found), summary)
            return pb.ClassifyResponse(
                classifications=[one for one, _ in found], labels=found[0][1], summary=write_encode_summary(summary)
            )

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
        """List the base models."""
        return pb.ListModelsResponse(
            models=[
                pb.Model(
                    name=m.manifest.name,
                    digest=m.manifest.digest,
                    context_length=m.manifest.context_length,
                    tasks=m.manifest.tasks,
                    labels=m.manifest.labels,
                )
                for m in self.models.served
            ]
        )
