"""The tenant in a call's metadata: without credentials it is the identity itself, which only loopback may accept."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc

from rpc.errors import Unauthenticated
from rpc.identity.principal import TENANT_KEY, CredentialKind, Principal, Role

_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

Metadata = Sequence[tuple[str, str | bytes]]
AuthContext = Mapping[str, Iterable[bytes]]

_EVERY_ROLE = frozenset(Role)


def named_tenant(metadata: Metadata) -> str:
    """Return the tenant that the metadata names, unproved; empty for none. Raises Unauthenticated."""
    given = [value for key, value in metadata if key == TENANT_KEY]
    if not given:
        return ""
    if len(given) != 1 or not isinstance(given[0], str):
        raise Unauthenticated(f"name the tenant in the call's metadata: {TENANT_KEY}, once")
    if not is_tenant(given[0]):
        raise Unauthenticated(
            f"{TENANT_KEY}: {given[0]!r} is not a tenant: 1 to 63 of a-z, 0-9, '.', '_', '-', a letter or digit first"
        )
    return given[0]


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


def metadata_of(context: grpc.aio.ServicerContext[Any, Any]) -> Metadata:
    """Return a call's metadata."""
    return tuple(context.invocation_metadata() or ())
