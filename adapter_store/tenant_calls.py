"""Bounds the calls of tenants that a store has open, so that one tenant's take neither its files nor its time.

Uploads have a bound of their own (open_uploads.py). A download whose client reads nothing ends after a while.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from rpc.errors import DeadlinePassed, Exhausted
from rpc.handlers import wrapped
from rpc.identity.principal import NAMING_ROLES, Principal, caller
from rpc.identity.running_calls import end_call
from rpc.shares import Shares

# Maximum number of tenants' calls at once, and of downloads; a tenant alone gets half of them. gRPC takes the next call
# only when each of these has had its turn on the loop: so downloads are few, and send short pieces, of so many bytes.
CALLS, DOWNLOADS = 64, 8
TENANT_PIECE_BYTES = 64 * 1024
# Timeout in seconds for a client to read a message of a stream; its download keeps a place until then.
SILENT_S = 30.0
# Mean time in seconds after which a refused client is to call again; each gets its own, so that they come spread out.
_RETRY_S = 1.0


class TenantCalls(grpc.aio.ServerInterceptor):
    """Refuses calls beyond a tenant's share. Operators and parts of the cluster, which name the tenant, have none."""

    def __init__(self, calls: int = CALLS, downloads: int = DOWNLOADS, silent_s: float = SILENT_S) -> None:
        self._calls, self._downloads = Shares(calls), Shares(downloads)
        self._silent_s = silent_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's handler; calls of the health service have no caller and are not counted."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler_call_details.method.startswith("/grpc."):
            return handler
        return wrapped(handler, self._many if handler.response_streaming else self._one)

    def _one(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def bounded(request: Any, context: Any) -> Any:
            with _counted(self._calls, "calls", caller()):
                return await method(request, context)

        return bounded

    def _many(self, method: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        async def bounded(request: Any, context: Any) -> AsyncIterator[Any]:
            with _counted(self._downloads, "downloads", caller()) as counts:
                async with aclosing(method(request, context)) as messages:
                    async for message in messages:
                        ending = self._end_later() if counts else None
                        try:
                            yield message
                        finally:
                            if ending is not None:
                                ending.cancel()

        return bounded

    def _end_later(self) -> asyncio.TimerHandle:
        """End the current call, unless the timer is cancelled: its client has not read a message in time."""
        task = asyncio.current_task()
        assert task is not None
        error = DeadlinePassed(f"the client has read nothing for {self._silent_s:g} s", reason="DOWNLOAD_TOO_SLOW")
        return asyncio.get_running_loop().call_later(self._silent_s, end_call, task, error)


@contextmanager
def _counted(shares: Shares, what: str, principal: Principal) -> Iterator[bool]:
    """Count a tenant's call while the context is open; yields whether it counts. Raises Exhausted."""
    tenant = principal.tenant
    if not tenant or principal.roles & NAMING_ROLES:
        yield False
        return
    if not shares.take(tenant):
        raise Exhausted(
            f"tenants/{tenant}/store-{what}",
            f"{tenant} has its share of the {shares.limit} {what} that this store serves at once",
            retry_after_s=random.uniform(0.5, 1.5) * _RETRY_S,
            reason="STORE_FULL",
        )
    try:
        yield True
    finally:
        shares.give(tenant)
