"""SglangScheduler: the engine protocol's calls as requests of this router, through the intake of all others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
from smg_grpc_proto import sglang_scheduler_pb2 as engine
from smg_grpc_proto import sglang_scheduler_pb2_grpc

from router.api.sglang.answers import EngineAnswer
from router.api.sglang.field_names import engine_field_names
from router.api.sglang.intake import Intake
from router.api.sglang.loras import Loras
from router.api.sglang.reasoning import reasoning_end
from router.api.sglang.reports import ServerReports, model_info
from router.api.sglang.requests import read_embedding, read_generate
from router.api.sglang.tokenizer_files import TokenizerFiles
from router.output.vectors import normalized
from rpc.errors import InvalidField, NotBuilt
from rpc.identity.principal import caller, calling_tenant

Context = grpc.aio.ServicerContext[Any, Any]


class SglangScheduler:
    """Serves sglang.grpc.scheduler.SglangScheduler.

    `adapter` is that of calls without lora_id; empty: the base model. `waits_for` returns what is missing before
    requests can be served, or nothing.
    """

    def __init__(self, intake: Intake, adapter: str, waits_for: Callable[[], str]) -> None:
        self._intake = intake
        self._models = intake.models
        self._adapter = adapter
        self._waits_for = waits_for
        self._reports = ServerReports(intake.models)
        self._loras = Loras(intake.models, intake.commands)
        self._tokenizers = TokenizerFiles()

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Stream the answer to a request: chunks if it asks for them, then each choice whole."""
        with self._intake.telemetry.new_record(context) as record, engine_field_names():
            call = record.begin(
                await read_generate(request, record.tenant, self._adapter, self._models, self._intake.encoder)
            )
            end = reasoning_end(self._models.get("").text) if request.require_reasoning else None
            answer = EngineAnswer(call, tuple(request.tokenized.input_ids), streamed=request.stream, end=end)
            del request  # it may be large, and a stream long
            async with aclosing(self._intake.generation.run(call, context.time_remaining())) as messages:
                async for message in messages:
                    record.count(message.event)
                    for response in answer.messages_of(message.event):
                        yield response

    async def Embed(self, request: Any, context: Context) -> Any:
        """Return the vector of a text, of length 1."""
        with self._intake.telemetry.new_record(context) as record, engine_field_names():
            call = record.begin(read_embedding(request, record.tenant, self._adapter))
            (vector,), summary = await self._intake.encoding.encode(call, context.time_remaining(), lambda one: one)
            record.count_texts("embed", 1, summary)
            return engine.EmbedResponse(
                embedding=normalized(vector.values),
                embedding_dim=len(vector.values),
                prompt_tokens=vector.prompt_tokens,
            )

    async def Abort(self, request: Any, context: Context) -> Any:
        """End a running request of the caller's tenant."""
        if not request.request_id:
            raise InvalidField("request_id", "name a request")
        found = await self._intake.generation.abort(calling_tenant(), request.request_id)
        return engine.AbortResponse(success=found, message="" if found else "no such request runs at this router")

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        """Tell whether requests are served, as grpc.health.v1 does."""
        missing = self._waits_for()
        return engine.HealthCheckResponse(healthy=not missing, message=f"waits for {missing}" if missing else "")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        """Describe the base model."""
        return model_info(self._models.get("").manifest, self._adapter)

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        """Describe the router, with the number of the caller's own requests that run."""
        who = caller()
        return self._reports.server_info(sum(who.sees_tenant(own.job.tenant) for own in self._intake.dispatcher.jobs))

    async def GetLoads(self, request: Any, context: Context) -> Any:
        """Report how busy the workers are."""
        return await self._reports.loads(request)

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Stream the base model's tokenizer as a zip."""
        async for chunk in self._tokenizers.chunks(self._models.get("").manifest):
            yield chunk

    async def LoadLoRAAdapter(self, request: Any, context: Context) -> Any:
        """Load an adapter of the store on all workers."""
        return await self._loras.load(request)

    async def UnloadLoRAAdapter(self, request: Any, context: Context) -> Any:
        """Allow an adapter to be evicted again."""
        return await self._loras.unload(request)

    async def ListLoadedLoRAAdapters(self, request: Any, context: Context) -> Any:
        """List the adapters that are kept on all workers."""
        return await self._loras.pinned()

    async def SubscribeKvEvents(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Refuse: which worker has which blocks is the queue's to know."""
        raise NotBuilt("SubscribeKvEvents")
        yield  # a stream, though an empty one

    async def FlushCache(self, request: Any, context: Context) -> Any:
        """Refuse: a block is never served to others than whom it was computed for."""
        raise NotBuilt("FlushCache")

    async def StartProfile(self, request: Any, context: Context) -> Any:
        """Refuse: workers have no profiler."""
        raise NotBuilt("StartProfile")

    async def StopProfile(self, request: Any, context: Context) -> Any:
        """Refuse: workers have no profiler."""
        raise NotBuilt("StopProfile")


def register(service: SglangScheduler, server: grpc.aio.Server) -> None:
    """Let a server serve the protocol."""
    sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(service, server)
