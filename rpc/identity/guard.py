"""The interceptor before every method of a server: it reads the caller's credential and asks the permissions table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import grpc

from rpc.errors import CallError, PermissionDenied, Unauthenticated
from rpc.handlers import wrapped
from rpc.identity.permissions import PERMISSIONS, Permission, Port
from rpc.identity.principal import NAMING_ROLES, TENANT_ROLES, CredentialKind, Principal, set_caller
from rpc.identity.running_calls import RunningCalls
from rpc.identity.tenant_header import AuthContext, HeaderReader, Metadata, metadata_of, named_tenant

Context = grpc.aio.ServicerContext[Any, Any]
# Called with the method's name, the caller if it is known, the error, and the caller's address.
Refused = Callable[[str, Principal | None, CallError, str], None]


class UndeclaredMethodError(Exception):
    """A method that a server is to serve, without a row in the permissions table."""


class CredentialReader(Protocol):
    """Reads one kind of credential."""

    def read(self, metadata: Metadata, auth_context: AuthContext) -> Principal | None:
        """Return the caller; None where the call has no credential of this kind. Raises CallError for a bad one."""


class Guard(grpc.aio.ServerInterceptor):
    """Admits callers to the methods of a server that listens on such `ports`.

    A call has exactly one credential, which one of the `readers` knows. `calls` end with their credentials.
    """

    def __init__(
        self,
        ports: Iterable[Port],
        readers: Sequence[CredentialReader],
        refused: Refused | None = None,
        *,
        calls: RunningCalls | None = None,
        permissions: Mapping[str, Permission] = PERMISSIONS,
    ) -> None:
        self._ports = frozenset(ports)
        self._readers = tuple(readers)
        self._refused = refused
        self._calls = calls
        self._permissions = permissions

    def check_declared(self, methods: Iterable[str]) -> None:
        """Raise UndeclaredMethodError where a method has no row in the table."""
        missing = sorted(set(methods) - set(self._permissions))
        if missing:
            raise UndeclaredMethodError(f"{missing[0]} has no row in rpc/identity/permissions.py: say who may call it")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's handler; rpc.status_interceptor turns what it raises into a status."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        permission = self._permissions.get(method, Permission())
        if permission.anybody:
            return handler
        return wrapped(handler, lambda inner: self._guarded(inner, method, permission))

    def _guarded(self, inner: Callable[..., Any], method: str, permission: Permission) -> Callable[..., Any]:
        def guarded(request: Any, context: Context) -> Any:
            self._admit(context, method, permission)
            return inner(request, context)

        return guarded

    def _admit(self, context: Context, method: str, permission: Permission) -> None:
        """Set the caller of the current task. Raises Unauthenticated or PermissionDenied."""
        principal = None
        try:
            metadata = metadata_of(context)
            principal = self.holder(metadata, context.auth_context())
            principal = naming(principal, metadata)
            self._check(principal, permission)
        except CallError as error:
            if self._refused is not None:
                holder = error.holder if isinstance(error, Unauthenticated) else None
                self._refused(method, principal or holder, error, context.peer())
            raise
        if self._calls is not None:
            self._calls.enter(principal)
        set_caller(principal)

    def holder(self, metadata: Metadata, auth_context: AuthContext) -> Principal:
        """Return the holder of a call's credential. Raises CallError."""
        found = [principal for reader in self._readers if (principal := reader.read(metadata, auth_context))]
        if not found:
            raise Unauthenticated(
                "no credential: give an API key, a token or a certificate", reason="CREDENTIAL_MISSING"
            )
        if len(found) > 1:
            raise Unauthenticated(
                "the call has two credentials; give one", reason="CREDENTIALS_DIFFER", holder=found[0]
            )
        return found[0]

    def _check(self, principal: Principal, permission: Permission) -> None:
        if not permission.allows(principal.roles, self._ports):
            roles, ports = ", ".join(sorted(principal.roles)), ", ".join(sorted(self._ports))
            raise PermissionDenied(f"role {roles} may not call this at the {ports} port", "ROLE_NOT_PERMITTED")
        if principal.scopes and permission.scope not in principal.scopes:
            raise PermissionDenied(f"the credential has no scope {permission.scope}", "SCOPE_NOT_GRANTED")


def naming(principal: Principal, metadata: Metadata) -> Principal:
    """Return a caller with the tenant that its call concerns. Raises CallError."""
    if principal.kind is CredentialKind.HEADER:
        return principal
    named = named_tenant(metadata)
    if principal.roles & NAMING_ROLES:
        if principal.roles & TENANT_ROLES:  # it could name any tenant at the port for tenants
            raise Unauthenticated("the credential is a tenant's and the cluster's", reason="CREDENTIAL_INVALID")
        return replace(principal, tenant=named)
    if named not in {"", principal.tenant}:
        raise PermissionDenied("the credential belongs to another tenant than the metadata names", "OTHER_TENANT")
    return principal


def open_guard(*ports: Port, refused: Refused | None = None) -> Guard:
    """Return the guard of a server without credentials: whoever reaches it may do everything, for any tenant."""
    return Guard(ports or Port, [HeaderReader()], refused)


def closed_guard() -> Guard:
    """Return the guard of a server that serves nothing but its health."""
    return Guard((), ())
