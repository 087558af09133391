"""An interceptor that counts and times the calls of a gRPC server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc
from prometheus_client import Counter, Histogram

from rpc.errors import CallError
from rpc.handlers import wrapped
from rpc.status import CODES


class CallMeter(grpc.aio.ServerInterceptor):
    """Counts and times calls. A stream counts when it ends; methods in `passed` are counted elsewhere.

    `ended` has the labels method and code, `seconds` method; see telemetry.metrics.Meters.rpc_calls.
    """

    def __init__(self, ended: Counter, seconds: Histogram, passed: Collection[str] = ()) -> None:
        self._ended = ended
        self._seconds = seconds
        self._passed = frozenset(passed)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's handler; calls of the health service are not counted."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.rpartition("/")[2]
        if handler is None or method in self._passed or handler_call_details.method.startswith("/grpc."):
            return handler
        wrap = self._many if handler.response_streaming else self._one
        return wrapped(handler, lambda inner: wrap(inner, method))

    def _one(self, method: Any, name: str) -> Callable[..., Awaitable[Any]]:
        async def metered(request: Any, context: Any) -> Any:
            began = time.monotonic()
            try:
                answer = await method(request, context)
            except BaseException as error:
                self._note(name, _code_of(error), began)
                raise
            self._note(name, "OK", began)
            return answer

        return metered

    def _many(self, method: Any, name: str) -> Callable[..., AsyncIterator[Any]]:
        async def metered(request: Any, context: Any) -> AsyncIterator[Any]:
            began = time.monotonic()
            try:
                async for response in method(request, context):
                    yield response
            except BaseException as error:
                self._note(name, _code_of(error), began)
                raise
            self._note(name, "OK", began)

        return metered

    def _note(self, name: str, code: str, began: float) -> None:
        self._ended.labels(name, code).inc()
        self._seconds.labels(name).observe(time.monotonic() - began)


def _code_of(error: BaseException) -> str:
    if isinstance(error, CallError):
        return CODES[type(error)].name
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return "CANCELLED"
    return "INTERNAL"
