"""Who is calling. Until there are credentials, the tenant is what the caller says that it is.

Replace `tenant_of` to authenticate otherwise; nothing else of the router looks at metadata.
"""

from __future__ import annotations

import re
from typing import Any

import grpc

from rpc.errors import InvalidField, Unauthenticated

TENANT_KEY = "x-loraplex-tenant"
_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def tenant_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The tenant of a call. Raises Unauthenticated without one, InvalidField when it is not a name."""
    metadata = dict(context.invocation_metadata() or ())
    tenant = metadata.get(TENANT_KEY)
    if tenant is None:
        raise Unauthenticated(f"no tenant: send the metadata key {TENANT_KEY}")
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise InvalidField(TENANT_KEY, "a tenant is 1 to 63 of a-z, 0-9, '.', '_', '-', a letter or digit first")
    return tenant
