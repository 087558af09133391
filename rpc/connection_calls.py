"""Bounds the calls of one connection that a server has open: those beyond are refused with a reason.

gRPC bounds a connection's streams too (rpc.edge). What is beyond that bound ends with UNAVAILABLE and without a reason,
so that bound is the larger one.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from rpc.errors import Exhausted
from rpc.handlers import wrapped
from rpc.receiving import current_call

# Mean time in seconds after which a refused client is to call again; each gets its own, so that they come spread out.
_RETRY_S = 1.0


class ConnectionCalls(grpc.aio.ServerInterceptor):
    """Refuses calls beyond `limit` of a connection.

    A call is open as long as its task: one whose client reads neither answer nor status counts until the client leaves.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[str, int] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's handler."""
        handler = await continuation(handler_call_details)
        return None if handler is None else wrapped(handler, self._counted)

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._enter(context.peer())
            return method(request, context)

        return counted

    def _enter(self, peer: str) -> None:
        """Count the current call until its end. Raises Exhausted."""
        count = self._open.get(peer, 0)
        if count >= self._limit:
            raise Exhausted(
                "connection/calls",
                f"the connection has {count} calls open, which are as many as may be; use another connection too",
                retry_after_s=random.uniform(0.5, 1.5) * _RETRY_S,
                reason="CONNECTION_FULL",
            )
        self._open[peer] = count + 1
        current_call().add_done_callback(partial(self._leave, peer))

    def _leave(self, peer: str, _: Any) -> None:
        left = self._open[peer] - 1
        if left:
            self._open[peer] = left
        else:
            del self._open[peer]
