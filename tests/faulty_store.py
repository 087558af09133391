"""A proxy between a worker and a real adapter store that breaks the downloads of single adapters."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Any

import grpc
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc

from loraplex.runtime.rpc.server import Server, channel_options
from loraplex.runtime.tenancy.guard import open_guard

Context = grpc.aio.ServicerContext[Any, Any]


class Fault(StrEnum):
    """A fault of an adapter's downloads."""

    TRICKLES = "one byte a second"
    HANGS = "nothing comes"
    SILENT = "nothing comes after the acceptance"
    GARBLED = "other bytes"
    TOO_LONG = "more bytes than there are"
    BREAKS_OFF = "the connection breaks in the middle"
    DOWN = "no connection"
    MISSING = "it was deleted"
    GATED = "it comes when the gate opens"


class FaultyStore:
    """Passes a worker's calls on to `target`; `faults` and `downloads` are by adapter name."""

    def __init__(self) -> None:
        self.target = ""
        self.faults: dict[str, Fault] = {}
        self.downloads: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self._news = asyncio.Condition()
        self._server = Server(open_guard())

    async def start(self, port: int = 0) -> str:
        """Serve at a port, 0 for any free one; the address."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "GetBaseModel": grpc.unary_unary_rpc_method_handler(
                self._get_base_model,
                request_deserializer=pb.GetBaseModelRequest.FromString,
                response_serializer=pb.GetBaseModelResponse.SerializeToString,
            ),
            "DownloadRevision": grpc.unary_stream_rpc_method_handler(
                self._download_revision,
                request_deserializer=pb.DownloadRevisionRequest.FromString,
                response_serializer=pb.DownloadRevisionResponse.SerializeToString,
            ),
        }
        generic = grpc.method_handlers_generic_handler("loraplex.adapters.v1.AdapterService", handlers)
        self._server.services.add_generic_rpc_handlers((generic,))
        port = self._server.bind("127.0.0.1", port)
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Stop, whatever is under way."""
        await self._server.stop(0)

    async def asked(self, adapter: str, count: int = 1) -> None:
        """Wait until so many downloads of an adapter have begun."""
        async with asyncio.timeout(60), self._news:
            await self._news.wait_for(lambda: self.downloads[adapter] >= count)

    async def _get_base_model(self, request: pb.GetBaseModelRequest, context: Context) -> pb.GetBaseModelResponse:
        """The real store's answer."""
        if not self.target:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the store is not up yet")
        async with grpc.aio.insecure_channel(self.target, options=channel_options()) as channel:
            try:
                answer = await adapters_pb2_grpc.AdapterServiceStub(channel).GetBaseModel(request)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
        return answer

    async def _download_revision(
        self, request: pb.DownloadRevisionRequest, context: Context
    ) -> AsyncIterator[pb.DownloadRevisionResponse]:
        """The real store's messages, as far as the fault lets them pass."""
        adapter = request.name.split("/")[3]
        self.downloads[adapter] += 1
        async with self._news:
            self._news.notify_all()
        fault = self.faults.get(adapter)
        match fault:
            case Fault.DOWN:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "failed to connect")
            case Fault.MISSING:
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such revision")
            case Fault.HANGS:
                await asyncio.Event().wait()
            case Fault.SILENT:
                await context.send_initial_metadata(())
                await asyncio.Event().wait()
            case Fault.GATED:
                await context.send_initial_metadata(())
                await self.gate.wait()
        metadata = [(key, value) for key, value in context.invocation_metadata() or () if key == "x-loraplex-tenant"]
        async with grpc.aio.insecure_channel(self.target, options=channel_options()) as channel:
            stub = adapters_pb2_grpc.AdapterServiceStub(channel)
            async for part in stub.DownloadRevision(request, metadata=metadata):
                if part.HasField("chunk"):
                    async for changed in _changed(part.chunk, fault, context):
                        yield changed
                else:
                    yield part


async def _changed(
    chunk: pb.FileChunk, fault: Fault | None, context: Context
) -> AsyncIterator[pb.DownloadRevisionResponse]:
    data = chunk.data
    pieces = [data]
    match fault:
        case Fault.TRICKLES:
            pieces = [data[at : at + 1] for at in range(len(data))]
        case Fault.GARBLED:
            pieces = [bytes(byte ^ 0x55 for byte in data)]
        case Fault.TOO_LONG:
            pieces = [data, data]
        case Fault.BREAKS_OFF:
            pieces = [data[: len(data) // 2]]
    for piece in pieces:
        yield pb.DownloadRevisionResponse(chunk=pb.FileChunk(name=chunk.name, data=piece))
        if fault is Fault.TRICKLES:
            await asyncio.sleep(1)
        if fault is Fault.BREAKS_OFF:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
