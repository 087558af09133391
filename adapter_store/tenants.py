"""The adapters that a tenant may use, and those that it may change."""

from __future__ import annotations

from adapter_store.convert import refusals
from artifacts.names import SHARED, AdapterName, check_tenant, parse_adapter_name
from rpc.errors import InvalidField, Mismatch, NotFound


def own_adapter(field: str, text: str, tenant: str) -> AdapterName:
    """Return the name of an adapter that the tenant is about to change. Raises InvalidField, and as check_owner."""
    with refusals(field):
        name = parse_adapter_name(text, tenant)
    check_owner(name, tenant)
    return name


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
    with refusals("parent"):
        check_tenant(listed)
    if listed not in {tenant, SHARED}:
        raise NotFound("tenant", parent)
    return [listed]
