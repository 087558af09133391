"""The interceptor before every method of a server: it reads the caller's credential and asks the permissions table."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from loraplex.runtime.rpc.errors import CallError, PermissionDenied
from loraplex.runtime.rpc.interceptors import CallGuard, Context, Handler, current_call, end_call, wrapped
from loraplex.runtime.rpc.principal import (
    BATCH_KEY,
    NAMING_ROLES,
    TENANT_KEY,
    TENANT_ROLES,
    CredentialKind,
    Principal,
    Role,
    Unauthenticated,
    set_caller,
)
from loraplex.runtime.tenancy.permissions import PERMISSIONS, Permission, Port

_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

Metadata = Sequence[tuple[str, str | bytes]]
AuthContext = Mapping[str, Iterable[bytes]]

_EVERY_ROLE = frozenset(Role)


def named_tenant(metadata: Metadata) -> str:
    """Return the tenant that the metadata names, unproved; empty for none. Raises Unauthenticated."""
    values = [value for key, value in metadata if key == TENANT_KEY]
    if not values:
        return ""
    if len(values) != 1 or not isinstance(values[0], str):
        raise Unauthenticated(f"name the tenant in the call's metadata: {TENANT_KEY}, once")
    if not is_tenant(values[0]):
        raise Unauthenticated(
            f"{TENANT_KEY}: {values[0]!r} is not a tenant: 1 to 63 of a-z, 0-9, '.', '_', '-', a letter or digit first"
        )
    return values[0]


def is_tenant(name: str) -> bool:
    """Tell whether a text can be a tenant's name."""
    return _TENANT.fullmatch(name) is not None


class HeaderReader:
    """Takes the tenant that the metadata names for the caller, who then may do everything."""

    def read(self, metadata: Metadata, auth_context: AuthContext) -> Principal:
        """Return the caller. Raises Unauthenticated."""
        tenant = named_tenant(metadata)
        return Principal(tenant or "anybody", _EVERY_ROLE, CredentialKind.HEADER, tenant)


def check_exposure(host: str, insecure_tenants: bool) -> None:
    """Raise ValueError where clients beyond this machine could name any tenant, unless `insecure_tenants` allows it."""
    if not insecure_tenants and not is_loopback(host):
        raise ValueError(
            f"--host {host}: clients beyond this machine could name any tenant; "
            "listen on 127.0.0.1, or accept that with --insecure-tenants"
        )


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def metadata_of(context: Context) -> Metadata:
    """Return a call's metadata."""
    return tuple(context.invocation_metadata() or ())


# Longest time in seconds between looks at the wall clock, which may be set.
LONGEST_S = 60.0


@dataclass(slots=True, eq=False)
class _Call:
    """A running call, the hash of the secret that it came with, and the timer of its end."""

    task: asyncio.Task[Any]
    secret: bytes
    timer: asyncio.TimerHandle | None = None


class RunningCalls:
    """The calls of a process's servers: they end with their credential, and with the revocation of their key."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._of_key: defaultdict[str, set[_Call]] = defaultdict(set)

    def enter(self, principal: Principal) -> None:
        """Add the call that the current task serves, until the task ends."""
        if not principal.key_id and principal.expires_at is None:
            return
        task = current_call()
        call = _Call(task, principal.secret_sha256)
        if principal.key_id:
            self._of_key[principal.key_id].add(call)
        self._end_at(call, principal.expires_at)
        task.add_done_callback(lambda _: self._leave(principal.key_id, call))

    def end(self, key_id: str, error: Callable[[], CallError]) -> None:
        """End the key's calls with an error, each with its own. May be called from another thread."""
        for call in tuple(self._of_key.get(key_id, ())):
            call.task.get_loop().call_soon_threadsafe(end_call, call.task, error())

    def change(self, key_id: str, ends_at: Callable[[bytes], float | None]) -> None:
        """Set anew when the key's calls end, by the hashes of their secrets. May be called from another thread."""
        for call in tuple(self._of_key.get(key_id, ())):
            call.task.get_loop().call_soon_threadsafe(self._end_at, call, ends_at(call.secret))

    def _end_at(self, call: _Call, at: float | None) -> None:
        """End a call at this time of the wall clock, which is looked at again every LONGEST_S."""
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        if at is None or call.task.done():
            return
        left_s = at - self._now()
        if left_s <= 0:
            end_call(call.task, Unauthenticated("the credential has expired", reason="CREDENTIAL_EXPIRED"))
            return
        call.timer = call.task.get_loop().call_later(min(left_s, LONGEST_S), self._end_at, call, at)

    def _leave(self, key_id: str, call: _Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if key_id:
            calls = self._of_key[key_id]
            calls.discard(call)
            if not calls:
                del self._of_key[key_id]


# Called with the method's name, the caller if it is known, the error, and the caller's address.
Refused = Callable[[str, Principal | None, CallError, str], None]


class UndeclaredMethodError(Exception):
    """A method that a server is to serve, without a row in the permissions table."""


class CredentialReader(Protocol):
    """Reads one kind of credential."""

    def read(self, metadata: Metadata, auth_context: AuthContext) -> Principal | None:
        """Return the caller; None where the call has no credential of this kind. Raises CallError for a bad one."""


class Guard(CallGuard):
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
            raise UndeclaredMethodError(f"{missing[0]} has no row in tenancy/permissions.py: say who may call it")

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Wrap the handler; rpc.interceptors turns what it raises into a status."""
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
        holders = [principal for reader in self._readers if (principal := reader.read(metadata, auth_context))]
        if not holders:
            raise Unauthenticated(
                "no credential: give an API key or a token, or a certificate at a port that asks for one",
                reason="CREDENTIAL_MISSING",
            )
        if len(holders) > 1:
            raise Unauthenticated(
                "the call has two credentials; give one", reason="CREDENTIALS_DIFFER", holder=holders[0]
            )
        return holders[0]

    def _check(self, principal: Principal, permission: Permission) -> None:
        if not permission.allows(principal.roles, self._ports):
            roles, ports = ", ".join(sorted(principal.roles)), ", ".join(sorted(self._ports))
            raise PermissionDenied(f"role {roles} may not call this at the {ports} port", "ROLE_NOT_PERMITTED")
        if not permission.is_within(principal.scopes):
            raise PermissionDenied(f"the credential has no scope {permission.scope}", "SCOPE_NOT_GRANTED")


def naming(principal: Principal, metadata: Metadata) -> Principal:
    """Return a caller with the tenant that its call concerns. Raises CallError."""
    if Role.BATCHES in principal.roles and (key := dict(metadata).get(BATCH_KEY)):
        principal = replace(principal, key_id=str(key).strip("-"), for_batch=True)
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
