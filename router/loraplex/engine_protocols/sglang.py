"""SglangScheduler: the calls of sglang's engine protocol as requests of this router.

An adapter's name in the store is its lora_name, its lora_id and its lora_path.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from smg_grpc_proto import sglang_scheduler_pb2 as engine
from smg_grpc_proto import sglang_scheduler_pb2_grpc

from loraplex.contracts.artifacts.names import SHARED
from loraplex.contracts.broker.commands import Verb
from loraplex.engine_protocols.answers import EngineAnswer
from loraplex.engine_protocols.engine_service import VERSION, EngineService
from loraplex.engine_protocols.sglang_messages import NAMES, engine_field_names, read_generate, reasoning_end
from loraplex.router.api.request_telemetry import RequestRecord
from loraplex.router.catalog.models import asking_redis
from loraplex.runtime.rpc.errors import InvalidField
from loraplex.runtime.rpc.interceptors import Context
from loraplex.runtime.rpc.principal import caller, calling_tenant


def _name(request: Any, others: tuple[str, ...]) -> str:
    """Return the adapter's name, which the `others` repeat where they are set. Raises InvalidField."""
    name: str = request.lora_name
    if not name:
        raise InvalidField("lora_name", "name an adapter of the store")
    for field in others:
        if (other := getattr(request, field)) and other != name:
            message = f"{other!r} is not lora_name ({name!r}): adapters are known by their names in the store"
            raise InvalidField(field, message)
    return name


class SglangScheduler(EngineService):
    """Serves sglang.grpc.scheduler.SglangScheduler."""

    messages, names = engine, NAMES
    sections = frozenset({"all", "core", "memory", "spec", "lora", "disagg", "queues"})

    def register(self, server: grpc.aio.Server) -> None:
        """Let a server serve the protocol."""
        sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(self, server)

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Stream the answer to a request: chunks if it asks for them, then each choice whole."""
        with RequestRecord(self._telemetry, context) as record, engine_field_names():
            call = record.begin(await read_generate(request, record.tenant, self._adapter, self._models, self._prompts))
            end = reasoning_end(self._models.get("").tokenizer) if request.require_reasoning else None
            answer = EngineAnswer(engine, call, tuple(request.tokenized.input_ids), streamed=request.stream, end=end)
            del request  # it may be large, and a stream long
            async with aclosing(self._stream(record, call, answer, context)) as responses:
                async for response in responses:
                    yield response

    async def Abort(self, request: Any, context: Context) -> Any:
        """End a running request of the caller's tenant."""
        if not request.request_id:
            raise InvalidField("request_id", "name a request")
        aborted = await self._generation.abort(calling_tenant(), request.request_id)
        return engine.AbortResponse(success=aborted, message="" if aborted else "no such request runs at this router")

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        """Describe the router, with the number of the caller's own requests that run."""
        return engine.GetServerInfoResponse(
            active_requests=self._active_requests(),
            uptime_seconds=time.monotonic() - self._began,
            sglang_version=VERSION,
            server_type="grpc",
            start_time=self._started_at,
        )

    async def LoadLoRAAdapter(self, request: Any, context: Context) -> Any:
        """Load an adapter of the store on all workers; one that is pinned is kept there."""
        name = _name(request, ("lora_id", "lora_path"))
        await self._commands.send(Verb.PIN if request.pinned else Verb.WARM, calling_tenant(), name, "")
        return engine.LoadLoRAAdapterResponse(success=True, loaded_lora_ids=await self._pinned_ids())

    async def UnloadLoRAAdapter(self, request: Any, context: Context) -> Any:
        """Allow an adapter to be evicted again, which happens when its place is needed."""
        await self._commands.send(Verb.UNPIN, calling_tenant(), _name(request, ("lora_id",)), "")
        return engine.UnloadLoRAAdapterResponse(success=True, loaded_lora_ids=await self._pinned_ids())

    async def ListLoadedLoRAAdapters(self, request: Any, context: Context) -> Any:
        """List the adapters that are kept on all workers and that the caller may see."""
        return engine.ListLoadedLoRAAdaptersResponse(loaded_adapters=await self._pinned())

    async def _pinned_ids(self) -> list[str]:
        return [adapter.lora_id for adapter in await self._pinned()]

    async def _pinned(self) -> list[Any]:
        who, visible = caller(), {}
        with asking_redis():
            cells = [cell for model in self._models.served for cell in self._models.reached(model)]
            pins = [pin for cell in cells for pin in await cell.queue.pins.list()]
        for pin in pins:
            # tenants/{tenant}/adapters/{adapter}/revisions/{digest}
            adapter, _, digest = pin.adapter.revision.rpartition("/revisions/")
            if who.sees_tenant(owner := adapter.split("/")[1]) or owner == SHARED:
                visible[pin.adapter.revision] = engine.LoadedLoRAAdapter(
                    lora_id=f"{adapter}@{digest}", lora_name=adapter, lora_path=pin.adapter.revision, pinned=True
                )
        return [visible[revision] for revision in sorted(visible)]
