"""The tenant of calls of the engine protocol that name none, at a router without credentials.

Gateways send no metadata of ours. With credentials the caller's tenant is that of its credential, as everywhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc

from rpc.handlers import Method, wrapped
from rpc.identity.permissions import SGLANG_SERVICE
from rpc.identity.principal import CredentialKind, caller, set_caller

Context = grpc.aio.ServicerContext[Any, Any]


class UnnamedCallers(grpc.aio.ServerInterceptor):
    """Gives callers without a credential and a name to a tenant. Put it behind the guard, which sets the caller."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the methods of the engine protocol."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(f"/{SGLANG_SERVICE}/"):
            return handler
        return wrapped(handler, self._named)

    def _named(self, inner: Method) -> Method:
        def named(request: Any, context: Context) -> Any:
            who = caller()
            if who.kind is CredentialKind.HEADER and not who.tenant:
                set_caller(replace(who, name=self._tenant, tenant=self._tenant))
            return inner(request, context)

        return named
