"""Who calls: the one place to replace when credentials come."""

from __future__ import annotations

from typing import Any

import grpc

from artifacts.errors import ArtifactError
from artifacts.names import check_tenant
from rpc.errors import Unauthenticated

TENANT_KEY = "x-loraplex-tenant"


def tenant_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The calling tenant, taken from the call's metadata unproved. Raises Unauthenticated."""
    given = [value for key, value in context.invocation_metadata() or () if key == TENANT_KEY]
    if len(given) != 1 or not isinstance(given[0], str):
        raise Unauthenticated(f"name the tenant in the call's metadata: {TENANT_KEY}, once")
    try:
        return check_tenant(given[0])
    except ArtifactError as error:
        raise Unauthenticated(f"{TENANT_KEY}: {error.message}") from error
