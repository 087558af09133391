"""The public gRPC service: calls come in, messages go out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc

from router.api.convert import read_prompt, read_request, write_message
from router.api.request_telemetry import RequestTelemetry
from router.catalog.models import Models
from router.generation.generation import Generation
from router.request import Received
from router.text.tokenizer import encode_prompt
from rpc.auth import tenant_of
from rpc.errors import InvalidField

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves loraplex.inference.v1.InferenceService."""

    def __init__(self, generation: Generation, models: Models, telemetry: RequestTelemetry) -> None:
        self._generation = generation
        self._models = models
        self._telemetry = telemetry

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Stream the answer to a request."""
        call = read_request(request.spec, tenant_of(context))
        with self._telemetry.new_record(call, context) as record:
            async with aclosing(self._generation.run(record.request, context.time_remaining())) as messages:
                async for message in messages:
                    record.count(message.event)
                    yield pb.GenerateResponse(event=write_message(message))

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> AsyncIterator[pb.ResumeResponse]:
        """Stream the rest of an answer whose stream was lost, at this router or another."""
        call = read_request(request.spec, tenant_of(context))
        received = _read_received(request.received, call.n)
        with self._telemetry.new_record(call, context) as record:
            rest = self._generation.resume(record.request, request.resume_token, received, context.time_remaining())
            async with aclosing(rest) as messages:
                async for message in messages:
                    record.count(message.event)
                    yield pb.ResumeResponse(event=write_message(message))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Return the ids of a prompt, as Generate makes them."""
        tenant_of(context)
        field, prompt = read_prompt(request)
        model = self._models.get(request.model)
        return pb.TokenizeResponse(token_ids=await encode_prompt(model.text, prompt, field))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Return the text of ids."""
        tenant_of(context)
        model = self._models.get(request.model)
        if request.token_ids and max(request.token_ids) >= model.manifest.vocab_size:
            raise InvalidField("token_ids", f"an id is beyond the vocabulary of {model.manifest.vocab_size}")
        if len(request.token_ids) > model.manifest.context_length:
            raise InvalidField("token_ids", f"more than the context of {model.manifest.context_length}")
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        return pb.DetokenizeResponse(text=model.text.decode(request.token_ids, skip_special_tokens=skip))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """List the base models."""
        return pb.ListModelsResponse(
            models=[
                pb.Model(name=m.manifest.name, digest=m.manifest.digest, context_length=m.manifest.context_length)
                for m in self._models.served
            ]
        )


def _read_received(received: Sequence[pb.ReceivedTokens], n: int) -> dict[int, Received]:
    """Return what the client has of each of `n` choices. Raises InvalidField."""
    read: dict[int, Received] = {}
    for index, part in enumerate(received):
        if part.choice >= n:
            raise InvalidField(f"received[{index}].choice", f"{part.choice}; the request has {n}")
        if part.choice in read:
            raise InvalidField(f"received[{index}].choice", f"{part.choice} is there twice")
        read[part.choice] = Received(tuple(part.token_ids), part.finished)
    return read
