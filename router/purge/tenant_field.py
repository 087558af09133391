"""The tenant that a call purges."""

from __future__ import annotations

from artifacts.errors import ArtifactError
from artifacts.names import SHARED, check_tenant
from rpc.errors import InvalidField


def purged_tenant(name: str) -> str:
    """Return a tenant's name. Raises InvalidField where it is none, or that of the shared adapters."""
    try:
        tenant = check_tenant(name)
    except ArtifactError as error:
        raise InvalidField("tenant", error.message) from error
    if tenant == SHARED:
        raise InvalidField("tenant", f"{SHARED!r} is no tenant: delete the shared adapters one by one")
    return tenant
