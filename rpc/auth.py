"""The tenant of a call. Until there are credentials, it is the tenant that the caller names.

Replace `tenant_of` to authenticate otherwise: routers and the store ask nobody else.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any

import grpc

from rpc.errors import Unauthenticated

TENANT_KEY = "x-loraplex-tenant"
_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def tenant_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the tenant that the call's metadata names, unproved. Raises Unauthenticated."""
    given = [value for key, value in context.invocation_metadata() or () if key == TENANT_KEY]
    if len(given) != 1 or not isinstance(given[0], str):
        raise Unauthenticated(f"name the tenant in the call's metadata: {TENANT_KEY}, once")
    if not _TENANT.fullmatch(given[0]):
        raise Unauthenticated(
            f"{TENANT_KEY}: {given[0]!r} is not a tenant: 1 to 63 of a-z, 0-9, '.', '_', '-', a letter or digit first"
        )
    return given[0]


def check_exposure(host: str, insecure_tenants: bool) -> None:
    """Raise ValueError where clients beyond this machine could name any tenant, unless `insecure_tenants` allows it."""
    if not insecure_tenants and not _is_loopback(host):
        raise ValueError(
            f"--host {host}: clients beyond this machine could name any tenant; "
            "listen on 127.0.0.1, or accept that with --insecure-tenants"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
