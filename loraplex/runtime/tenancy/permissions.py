"""Every RPC of the cluster, and who may call it where. docs/reference/permissions.md is made from this table.

A method without a row does not start a server; a role that a row does not list for the port is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from loraplex.runtime.rpc.principal import Role


class Port(StrEnum):
    """Kinds of ports that a process listens on. Without credentials one port of a router or store serves all but RELAY.

    PUBLIC is for tenants, OPERATORS for operators and the parts of the cluster, RELAY for workers.
    """

    PUBLIC = "public"
    OPERATORS = "operators"
    RELAY = "relay"


Roles = frozenset[Role]


@dataclass(frozen=True, slots=True)
class Permission:
    """The roles that may call a method, by port. A key or token that has scopes needs this `scope` among them.

    The scope `generate` includes `tokenize`: whoever may generate may list the base models and count tokens first.
    `anybody`: no credential is asked for, at any port.
    """

    scope: str = ""
    roles: Mapping[Port, Roles] = field(default_factory=dict)
    anybody: bool = False

    def allows(self, roles: Roles, ports: frozenset[Port]) -> bool:
        """Tell whether one of the roles may call the method at one of the ports."""
        return any(roles & allowed for port, allowed in self.roles.items() if port in ports)

    def is_within(self, scopes: frozenset[str]) -> bool:
        """Tell whether a credential with these scopes may call the method; without any it may call all."""
        return not scopes or self.scope in scopes or (self.scope == TOKENIZE and GENERATE in scopes)


_USERS = frozenset({Role.TENANT_USER, Role.TENANT_ADMIN})
_ADMINS = frozenset({Role.TENANT_ADMIN})
_OPERATORS = frozenset({Role.OPERATOR})
_WATCHERS = frozenset({Role.OPERATOR, Role.AUDITOR})
_ROUTERS = frozenset({Role.ROUTER})
_PARTS = frozenset({Role.ROUTER, Role.WORKER})

GENERATE, TOKENIZE = "generate", "tokenize"
ADAPTERS_READ, ADAPTERS_WRITE = "adapters.read", "adapters.write"
JOBS_READ = "jobs.read"
CLUSTER_READ, CLUSTER_WRITE = "cluster.read", "cluster.write"
MODELS_READ, MODELS_WRITE = "models.read", "models.write"
KEYS_READ, KEYS_WRITE = "keys.read", "keys.write"
TENANTS_WRITE = "tenants.write"
PLANS_READ, PLANS_WRITE = "plans.read", "plans.write"
ACCOUNTS = "accounts"
OUTCOMES = "outcomes"
RELAY = "relay"

# The service of the engine protocol (docs/reference/engine-protocol.md), which a router serves if it is told to.
SGLANG_SERVICE = "sglang.grpc.scheduler.SglangScheduler"
REFLECTION_SERVICE = "grpc.reflection.v1alpha.ServerReflection"

_GENERATE = Permission(GENERATE, {Port.PUBLIC: _USERS})
_TOKENIZE = Permission(TOKENIZE, {Port.PUBLIC: _USERS})
# Operators upload adapters too: those of all tenants, of the tenant `shared`.
_READ_ADAPTERS = Permission(ADAPTERS_READ, {Port.PUBLIC: _USERS, Port.OPERATORS: _WATCHERS})
_WRITE_ADAPTERS = Permission(ADAPTERS_WRITE, {Port.PUBLIC: _ADMINS, Port.OPERATORS: _OPERATORS})
_READ_CLUSTER = Permission(CLUSTER_READ, {Port.OPERATORS: _WATCHERS})
_WRITE_CLUSTER = Permission(CLUSTER_WRITE, {Port.OPERATORS: _OPERATORS})
# A tenant sees its own jobs.
_READ_JOBS = Permission(JOBS_READ, {Port.PUBLIC: _USERS, Port.OPERATORS: _WATCHERS})
_WRITE_TENANTS = Permission(TENANTS_WRITE, {Port.OPERATORS: _OPERATORS})
_WRITE_KEYS = Permission(KEYS_WRITE, {Port.OPERATORS: _OPERATORS})
_READ_PLANS = Permission(PLANS_READ, {Port.OPERATORS: _WATCHERS})
_WRITE_PLANS = Permission(PLANS_WRITE, {Port.OPERATORS: _OPERATORS})
_READ_MODELS = Permission(MODELS_READ, {Port.OPERATORS: _WATCHERS | _PARTS})


def _of(service: str, rows: Mapping[str, Permission]) -> dict[str, Permission]:
    return {f"/{service}/{method}": row for method, row in rows.items()}


PERMISSIONS: Mapping[str, Permission] = {
    **_of("grpc.health.v1.Health", dict.fromkeys(("Check", "Watch", "List"), Permission(anybody=True))),
    **_of(
        "loraplex.inference.v1.InferenceService",
        {
            "Generate": _GENERATE,
            "Resume": _GENERATE,
            "Score": _GENERATE,
            "Embed": _GENERATE,
            "Classify": _GENERATE,
            "Tokenize": _TOKENIZE,
            "CountTokens": _TOKENIZE,
            "Detokenize": _TOKENIZE,
            "ListModels": _TOKENIZE,
        },
    ),
    **_of(
        "loraplex.adapters.v1.AdapterService",
        {
            "UploadRevision": _WRITE_ADAPTERS,
            "ImportRevision": _WRITE_ADAPTERS,
            "ExportRevision": _WRITE_ADAPTERS,
            "CertifyRevision": _WRITE_ADAPTERS,
            "ValidateAdapter": _WRITE_ADAPTERS,
            "SetAlias": _WRITE_ADAPTERS,
            "DeleteAdapter": _WRITE_ADAPTERS,
            "ListAdapters": _READ_ADAPTERS,
            "ListRevisions": _READ_ADAPTERS,
            # Names of all tenants' adapters, as GetTraffic has them.
            "FindRevisions": _READ_CLUSTER,
            "GetAdapter": Permission(ADAPTERS_READ, {Port.PUBLIC: _USERS, Port.OPERATORS: _WATCHERS | _ROUTERS}),
            "ListAdapterChanges": Permission(ADAPTERS_READ, {Port.OPERATORS: _ROUTERS}),
            "DownloadRevision": Permission(ADAPTERS_READ, {Port.PUBLIC: _USERS, Port.OPERATORS: _PARTS}),
            "RegisterBaseModel": Permission(MODELS_WRITE, {Port.OPERATORS: _OPERATORS}),
            "PromoteBaseModel": Permission(MODELS_WRITE, {Port.OPERATORS: _OPERATORS}),
            "GetBaseModel": _READ_MODELS,
            "ListBaseModels": _READ_MODELS,
            "DownloadBaseModel": _READ_MODELS,
        },
    ),
    **_of(
        "loraplex.adapters.v1.ReleaseService",
        {
            "CreateRelease": _WRITE_ADAPTERS,
            "QualifyRelease": _WRITE_ADAPTERS,
            "PromoteRelease": _WRITE_ADAPTERS,
            "AbortRelease": _WRITE_ADAPTERS,
            "RollBackRelease": _WRITE_ADAPTERS,
            "GetRelease": _READ_ADAPTERS,
            "ListReleases": _READ_ADAPTERS,
            "WatchReleases": _READ_ADAPTERS,
            "ReportOutcomes": Permission(OUTCOMES, {Port.OPERATORS: _ROUTERS}),
        },
    ),
    **_of(
        "loraplex.cluster.v1.ClusterService",
        {
            "ListWorkers": _READ_CLUSTER,
            "ListQueues": _READ_CLUSTER,
            "GetTraffic": _READ_CLUSTER,
            "ListJobs": _READ_JOBS,
            "ListDeadJobs": _READ_JOBS,
            "DrainWorker": _WRITE_CLUSTER,
            "DrainCell": _WRITE_CLUSTER,
            "OpenCell": _WRITE_CLUSTER,
            "WarmAdapter": _WRITE_CLUSTER,
            "PinAdapter": _WRITE_CLUSTER,
            "UnpinAdapter": _WRITE_CLUSTER,
            "PurgeTenant": _WRITE_TENANTS,
            "ListQuarantine": _READ_JOBS,
            "LiftQuarantine": _WRITE_CLUSTER,
            "RotateResumeKeys": _WRITE_CLUSTER,
            "WithdrawResumeKeys": _WRITE_CLUSTER,
        },
    ),
    **_of(
        "loraplex.admin.v1.KeyService",
        {
            "CreateKey": _WRITE_KEYS,
            "RotateKey": _WRITE_KEYS,
            "RevokeKey": _WRITE_KEYS,
            "ListKeys": Permission(KEYS_READ, {Port.OPERATORS: _WATCHERS}),
            "ListKeyChanges": Permission(KEYS_READ, {Port.OPERATORS: _ROUTERS}),
        },
    ),
    **_of(
        "loraplex.admin.v1.PlanService",
        {
            "SetPlan": _WRITE_PLANS,
            "DeletePlan": _WRITE_PLANS,
            "GetPlan": _READ_PLANS,
            "ListPlans": _READ_PLANS,
            "ListPlanChanges": Permission(PLANS_READ, {Port.OPERATORS: _ROUTERS}),
        },
    ),
    **_of(
        "loraplex.admin.v1.AccountService",
        dict.fromkeys(("SaveAccounts", "ListAccounts"), Permission(ACCOUNTS, {Port.OPERATORS: _ROUTERS})),
    ),
    **_of(
        "loraplex.admin.v1.TenantService",
        {
            "PurgeTenant": _WRITE_TENANTS,
            "ListGoneRevisions": Permission(ADAPTERS_READ, {Port.OPERATORS: frozenset({Role.WORKER})}),
        },
    ),
    **_of(
        "loraplex.admin.v1.GrantService",
        {
            "CreateGrant": _WRITE_ADAPTERS,
            "DeleteGrant": _WRITE_ADAPTERS,
            "ListGrants": Permission(ADAPTERS_READ, {Port.PUBLIC: _ADMINS, Port.OPERATORS: _WATCHERS}),
        },
    ),
    **_of("loraplex.relay.v1.RelayService", {"Connect": Permission(RELAY, {Port.RELAY: frozenset({Role.WORKER})})}),
    **_of(
        SGLANG_SERVICE,
        {
            "Generate": _GENERATE,
            "Embed": _GENERATE,
            "Abort": _GENERATE,
            "GetModelInfo": _TOKENIZE,
            "GetServerInfo": _TOKENIZE,
            "GetTokenizer": _TOKENIZE,
            "HealthCheck": _TOKENIZE,
            "ListLoadedLoRAAdapters": _READ_ADAPTERS,
            "LoadLoRAAdapter": _WRITE_CLUSTER,
            "UnloadLoRAAdapter": _WRITE_CLUSTER,
            "GetLoads": _READ_CLUSTER,
            # The token ids of prompts and answers: a tenant sees its own, and auditors none.
            "SubscribeKvEvents": Permission(GENERATE, {Port.PUBLIC: _USERS, Port.OPERATORS: _OPERATORS}),
            "FlushCache": _WRITE_CLUSTER,
            "StartProfile": _WRITE_CLUSTER,
            "StopProfile": _WRITE_CLUSTER,
        },
    ),
    **_of(REFLECTION_SERVICE, {"ServerReflectionInfo": Permission(CLUSTER_READ, {Port.OPERATORS: _OPERATORS})}),
    # A router asks its own address, to find out whether it leads to itself.
    **_of("loraplex.relay.v1.IdentityService", {"Identify": Permission(RELAY, {Port.RELAY: _PARTS})}),
    **_of("loraplex.relay.v1.TenantDataService", {"ForgetTenant": Permission(RELAY, {Port.RELAY: _ROUTERS})}),
    # KEDA has no credential. The scaler's port has no other service; with TLS it asks for KEDA's certificate.
    **_of(
        "externalscaler.ExternalScaler",
        dict.fromkeys(("IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics"), Permission(anybody=True)),
    ),
}

# The scopes that keys and tokens may be restricted to.
SCOPES = frozenset(row.scope for row in PERMISSIONS.values() if row.scope)
