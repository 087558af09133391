"""The adapters that a tenant may use, and those that it may change."""

from __future__ import annotations

from artifacts.errors import ArtifactError
from artifacts.names import SHARED, AdapterName, check_tenant
from rpc.errors import InvalidField, Mismatch, NotFound


def check_owner(name: AdapterName, tenant: str) -> None:
    """Check that the tenant may change the adapter.

    Raises Mismatch on a shared adapter, which the tenant may use, and NotFound on another tenant's, also if it exists.
    """
    if name.tenant == tenant:
        return
    if name.tenant == SHARED:
        raise Mismatch("tenant", f"{name} is shared: only tenant {SHARED} may change it", reason="NOT_OWNER")
    raise NotFound("adapter", str(name))


def listed_tenants(parent: str, tenant: str) -> list[str]:
    """Return the tenants whose adapters a list with this parent shows. Raises InvalidField, NotFound."""
    if not parent:
        return sorted({tenant, SHARED})
    listed = parent.removeprefix("tenants/")
    if listed == parent:
        raise InvalidField("parent", f"{parent!r} is not a name like tenants/TENANT")
    try:
        check_tenant(listed)
    except ArtifactError as error:
        raise InvalidField("parent", error.message) from error
    if listed not in {tenant, SHARED}:
        raise NotFound("tenant", parent)
    return [listed]
