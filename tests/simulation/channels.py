"""The network as grpc.aio knows it: channels, calls whose messages are real bytes, and servers' handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, Self

import grpc

from tests.simulation.loop import NODE, Node
from tests.simulation.network import Handlers, Network, Stream

# Sent when a side ends in order.
_END = b"end"


class Channels:
    """Stands in for grpc.aio.insecure_channel."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def __call__(self, address: str, **_: object) -> Channel:
        """A channel of the node that asks."""
        node = NODE.get()
        assert node is not None, "only nodes call"
        return Channel(self._network, node, address)


class Registrar:
    """Takes the handlers that generated code adds to a server."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Do nothing: add_registered_method_handlers gets the same handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Of a whole service."""
        self._handlers.update({f"/{service}/{method}": handler for method, handler in handlers.items()})


class Channel:
    """A client's way to one address."""

    def __init__(self, network: Network, node: Node, address: str) -> None:
        self._network = network
        self._node = node
        self._address = address

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Close nothing: callers cancel their own streams."""

    async def close(self, grace_s: float | None = None) -> None:
        """Close nothing."""

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_: object,
    ) -> Callable[[], Call]:
        """Return a callable that opens streams, as a generated stub asks for."""

        def call() -> Call:
            return Call(self._network, self._node, self._address, method, request_serializer, response_deserializer)

        return call

    def _other(self, method: str, *_: object, **__: object) -> None:
        """Kinds of calls that nobody makes here."""

    unary_unary = unary_stream = stream_unary = _other


class Call:
    """A client's end; iterates over the responses."""

    def __init__(
        self,
        network: Network,
        node: Node,
        address: str,
        method: str,
        write: Callable[[Any], bytes],
        read: Callable[[bytes], Any],
    ) -> None:
        self._network = network
        self._node = node
        self._address = address
        self._method = method
        self._write = write
        self._read = read
        self._stream: Stream | None = None
        self._opened = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Any]:
        """The responses. Raises AioRpcError where the stream can't be opened, or breaks."""
        await asyncio.sleep(self._network.delay_s())
        found = self._network.find(self._address)
        if found is None or found[0].dead or self._network.is_cut(self._node, found[0]):
            raise _unavailable()
        node, handlers = found
        stream = self._stream = Stream(self._network, self._node, node)
        self._opened.set()
        stream.serving = node.start(_serve(stream, handlers[self._method], self._network))
        while True:
            data = await stream.down.arrived.get()
            if data is None:
                raise _unavailable()
            if data == _END:
                stream.end()
                return
            yield self._read(data[1:])

    async def write(self, request: Any) -> None:
        """Send a request. Raises InvalidStateError once the stream has broken."""
        (await self._open()).up.send(b"m" + self._write(request))

    async def done_writing(self) -> None:
        """Tell that no more requests come."""
        (await self._open()).up.send(_END)

    async def _open(self) -> Stream:
        await self._opened.wait()
        assert self._stream is not None
        if self._stream.broken:
            raise asyncio.InvalidStateError("the stream is broken")
        return self._stream

    def cancel(self) -> None:
        """End it from this side."""
        if self._stream is not None:
            self._stream.break_off()


async def _serve(stream: Stream, handler: grpc.RpcMethodHandler[Any, Any], network: Network) -> None:
    read, write = handler.request_deserializer, handler.response_serializer
    assert read is not None
    assert write is not None
    serve: Any = handler.stream_stream
    mine = asyncio.current_task()
    assert mine is not None

    async def requests() -> AsyncIterator[Any]:
        while True:
            data = await stream.up.arrived.get()
            if data is None:
                mine.cancel()  # as grpc does to a handler whose call is gone
                raise grpc.aio.UsageError("RPC already finished.")
            if data == _END:
                return
            yield read(data[1:])

    responses = serve(requests(), None)
    try:
        async for response in responses:
            stream.down.send(b"m" + write(response))
        stream.down.send(_END)
    except (asyncio.CancelledError, grpc.aio.UsageError):
        stream.break_off()
    finally:
        await responses.aclose()


def _unavailable() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the link is gone")
