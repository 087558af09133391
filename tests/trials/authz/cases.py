"""The cases: every RPC x port x role x kind of credential x fault, and the answer that the table demands of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loraplex.runtime.rpc.principal import TENANT_ROLES, Role
from loraplex.runtime.rpc.settings import is_installed
from loraplex.runtime.tenancy.api_keys import KEY_ROLES
from loraplex.runtime.tenancy.permissions import ENGINE_SERVICES, PERMISSIONS, REFLECTION_SERVICE, Port

# Ports by the word that the ready lines have for them; the client port has none.
PORTS = {"public": Port.PUBLIC, "mtls": Port.PUBLIC, "operators": Port.OPERATORS, "operators-mtls": Port.OPERATORS}
# Services that the servers of the cases have; the relay has a port of its own.
SERVERS = {
    "loraplex.inference.v1.InferenceService": "router",
    "loraplex.cluster.v1.ClusterService": "router",
    "loraplex.adapters.v1.AdapterService": "store",
    "loraplex.adapters.v1.ReleaseService": "store",
    "loraplex.admin.v1.KeyService": "store",
    "loraplex.admin.v1.GrantService": "store",
    "loraplex.admin.v1.PlanService": "store",
    "loraplex.admin.v1.AccountService": "store",
    "loraplex.admin.v1.TenantService": "store",
    "loraplex.batches.v1.BatchService": "store",
}
# Services of the router whose packages need not be installed: they are called where they are.
OPTIONAL = dict.fromkeys(ENGINE_SERVICES, "smg_grpc_proto") | {REFLECTION_SERVICE: "grpc_reflection"}
SERVERS |= {service: "router" for service, module in OPTIONAL.items() if is_installed(module)}
# Faults by kind of credential. OTHER: the call names another tenant than the credential's.
OTHER, TWO = "other tenant's", "two credentials"
INVALID, EXPIRED, REVOKED = "CREDENTIAL_INVALID", "CREDENTIAL_EXPIRED", "CREDENTIAL_REVOKED"
FAULTS: dict[str, dict[str, str]] = {
    "key": {
        "wrong": INVALID,
        "unknown": INVALID,
        "malformed": INVALID,
        "expired": EXPIRED,
        "revoked": REVOKED,
        "rotated away": EXPIRED,
        OTHER: "",
        "other scope": "",
    },
    "jwt": {
        "wrong": INVALID,
        "expired": EXPIRED,
        "not yet": INVALID,
        "no algorithm": INVALID,
        "wrong algorithm": INVALID,
        "wrong audience": INVALID,
        "wrong issuer": INVALID,
        OTHER: "",
        "other scope": "",
    },
    "certificate": {"expired": "", "wrong CA": "", "names nobody": INVALID, OTHER: "", TWO: "CREDENTIALS_DIFFER"},
}
NAMING = frozenset({Role.OPERATOR, Role.AUDITOR, Role.ROUTER, Role.WORKER, Role.BATCHES})
# Reasons of the guard's refusals: an answer without one of them shows that the guard let the call pass.
REASONS = frozenset(
    {
        "CREDENTIAL_MISSING",
        INVALID,
        EXPIRED,
        REVOKED,
        "CREDENTIALS_DIFFER",
        "OTHER_TENANT",
        "ROLE_NOT_PERMITTED",
        "SCOPE_NOT_GRANTED",
        "UNAUTHENTICATED",
        "PERMISSION_DENIED",
    }
)


@dataclass(frozen=True)
class Case:
    """A call of `method` at a port. `kind` is key, jwt, certificate or nothing; `fault` none where all is right."""

    method: str
    port: str
    kind: str
    role: Role | None
    fault: str

    @property
    def server(self) -> str:
        """Return which process has the method."""
        return SERVERS[self.method.split("/")[1]]

    @property
    def mutual(self) -> bool:
        """Tell whether the port requires a certificate of the authority."""
        return self.port.endswith("mtls")

    @property
    def expected(self) -> str:
        """Return `admitted`, `no connection`, or the reason of the refusal."""
        if self.mutual and (self.kind != "certificate" or self.fault in {"expired", "wrong CA"}):
            return "no connection"
        if self.role is None or (self.kind == "certificate" and not self.mutual and self.fault != TWO):
            return "CREDENTIAL_MISSING"
        if self.fault == TWO and not self.mutual:  # the port asks for no certificate: the key alone arrives
            return self._permitted(TENANT_ROLES & {Role.TENANT_USER})
        if reason := FAULTS[self.kind].get(self.fault, ""):
            return reason
        if self.fault == OTHER and self.role not in NAMING:
            return "OTHER_TENANT"
        return self._permitted(frozenset({self.role}))

    def _permitted(self, roles: frozenset[Role]) -> str:
        row = PERMISSIONS[self.method]
        if not roles & row.roles.get(PORTS[self.port], frozenset()):
            return "ROLE_NOT_PERMITTED"
        return "SCOPE_NOT_GRANTED" if self.fault == "other scope" else "admitted"


def all_cases() -> Iterator[Case]:
    """Yield every case."""
    methods = [name for name in PERMISSIONS if name.split("/")[1] in SERVERS]
    for method in methods:
        for port in PORTS:
            yield Case(method, port, "nothing", None, "missing")
            for kind, faults in FAULTS.items():
                for role in Role if kind == "certificate" else KEY_ROLES:
                    for fault in ("none", *faults):
                        yield Case(method, port, kind, role, fault)
