"""Wraps the method of a gRPC handler, for interceptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

Method = Callable[..., Any]

# Makers of handlers, by whether requests and whether responses are streams.
_MAKERS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def wrapped(
    handler: grpc.RpcMethodHandler[Any, Any],
    wrap: Callable[[Method], Method],
    request_deserializer: Callable[[bytes], Any] | None = None,
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler of the same kind with a wrapped method, and perhaps another reader of its requests."""
    method: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    make = _MAKERS[handler.request_streaming, handler.response_streaming]
    return make(wrap(method), request_deserializer or handler.request_deserializer, handler.response_serializer)
