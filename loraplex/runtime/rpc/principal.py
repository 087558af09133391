"""The caller of an RPC, as its credential proves it; handlers ask `caller()` and `calling_tenant()`."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

from loraplex.runtime.rpc.errors import CallError

TENANT_KEY = "x-loraplex-tenant"
# Metadata of a call for a batch: the id of the API key that made it, or `-`.
BATCH_KEY = "x-loraplex-batch-key"
# Metadata of a worker's download: a router's grant (tenancy/signatures.py).
WORKER_GRANT_KEY = "x-loraplex-grant-bin"


class Role(StrEnum):
    """Kinds of callers; tenancy.permissions says what each may call."""

    TENANT_USER = "tenant-user"
    TENANT_ADMIN = "tenant-admin"
    TRAINER = "trainer"
    OPERATOR = "operator"
    AUDITOR = "auditor"
    ROUTER = "router"
    WORKER = "worker"
    STORE = "store"
    BATCHES = "batches"


# Roles of callers that belong to a tenant.
TENANT_ROLES = frozenset({Role.TENANT_USER, Role.TENANT_ADMIN, Role.TRAINER})
# Roles that name the tenant whom a call concerns in its metadata: parts of the cluster, which act for all tenants,
# operators, and auditors, who may read alone. For all others the credential alone says it.
NAMING_ROLES = frozenset({Role.OPERATOR, Role.AUDITOR, Role.ROUTER, Role.WORKER, Role.BATCHES})


class CredentialKind(StrEnum):
    """Kinds of credentials."""

    # The tenant's name in the metadata, without proof.
    HEADER = "header"
    API_KEY = "api-key"
    JWT = "jwt"
    CERTIFICATE = "certificate"


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. `name` is for logs; `tenant` is empty for callers that concern no tenant.

    `subject` is whose the credential is, the same for all that one holder gets; empty where it does not say.
    No `scopes`: everything that the roles permit. `expires_at` is in seconds since 1970, from when on the credential is
    refused; None: never. `secret_sha256` tells apart the secrets of an API key.
    """

    name: str
    roles: frozenset[Role]
    kind: CredentialKind
    tenant: str = ""
    key_id: str = ""
    scopes: frozenset[str] = field(default_factory=frozenset)
    expires_at: float | None = None
    secret_sha256: bytes = field(default=b"", repr=False)
    subject: str = ""
    # Whether it calls for a batch: such a call is charged once for its request id, and once it is complete.
    for_batch: bool = False

    def sees_tenant(self, tenant: str) -> bool:
        """Tell whether lists show this caller the things of a tenant."""
        return tenant == self.tenant or bool(self.roles & {Role.OPERATOR, Role.AUDITOR})


class Unauthenticated(CallError):
    """No credential, or a bad one. `holder` is whose it is, where it was right once: for the audit log."""

    reason = "UNAUTHENTICATED"

    def __init__(self, message: str, *, reason: str | None = None, holder: Principal | None = None) -> None:
        super().__init__(message, reason=reason)
        self.holder = holder


_CALLER: ContextVar[Principal | None] = ContextVar("caller", default=None)


def set_caller(principal: Principal) -> None:
    """Set the caller of the RPC that the current task serves; the guard does it before each method."""
    _CALLER.set(principal)


def known_caller() -> Principal | None:
    """Return the caller of the RPC that the current task serves; None for one that anybody may call."""
    return _CALLER.get()


def caller() -> Principal:
    """Return the caller of the RPC that the current task serves. Raises Unauthenticated outside a guarded RPC."""
    principal = _CALLER.get()
    if principal is None:
        raise Unauthenticated("the call has no credential")
    return principal


def calling_key() -> str:
    """Return the id of the API key that the current RPC was called with, or nothing."""
    principal = _CALLER.get()
    return principal.key_id if principal else ""


def only_trains() -> bool:
    """Tell whether the caller of the current RPC may change nothing but what trainers push."""
    roles = principal.roles if (principal := _CALLER.get()) else frozenset()
    return Role.TRAINER in roles and not roles & {Role.TENANT_ADMIN, Role.OPERATOR}


def own_tenant() -> str:
    """Return the tenant whose things alone the caller of the current RPC sees; empty: those of all tenants."""
    return "" if caller().roles & NAMING_ROLES else calling_tenant()


def calling_tenant() -> str:
    """Return the tenant of the current RPC. Raises Unauthenticated if it has none."""
    if not (tenant := caller().tenant):
        raise Unauthenticated(f"name the tenant in the call's metadata: {TENANT_KEY}, once")
    return tenant
