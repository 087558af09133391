"""Every RPC of the cluster, who may call it where, and what the audit log has of it.

docs/reference/permissions.md is made from this table.

A method without a row does not start a server; a role that a row does not list for the port is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from loraplex.admin.v1.plans_pb2 import Plan
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
class Audited:
    """The fields of a method's request and answer that its records have, as paths such as `key.key_id`."""

    request: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Permission:
    """The roles that may call a method, by port. A key or token that has scopes needs this `scope` among them.

    The scope `generate` includes `tokenize`: whoever may generate may list the base models and count tokens first.
    `anybody`: no credential is asked for, at any port. `audited`: the audit log has its calls.
    """

    scope: str = ""
    roles: Mapping[Port, Roles] = field(default_factory=dict)
    anybody: bool = False
    audited: Audited | None = None

    def allows(self, roles: Roles, ports: frozenset[Port]) -> bool:
        """Tell whether one of the roles may call the method at one of the ports."""
        return any(roles & allowed for port, allowed in self.roles.items() if port in ports)

    def is_within(self, scopes: frozenset[str]) -> bool:
        """Tell whether a credential with these scopes may call the method; without any it may call all."""
        return not scopes or self.scope in scopes or (self.scope == TOKENIZE and GENERATE in scopes)

    def recorded(self, *request: str, answer: tuple[str, ...] = ()) -> Permission:
        """Return the row of a method that changes something, with the fields that the audit log has of it."""
        return replace(self, audited=Audited(request, answer))


_USERS = frozenset({Role.TENANT_USER, Role.TENANT_ADMIN})
_ADMINS = frozenset({Role.TENANT_ADMIN})
_SAMPLERS = _USERS | {Role.TRAINER}
# Trainers push revisions that expire, and remove what trainers pushed.
_PUSHERS = _ADMINS | {Role.TRAINER}
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

# The services of engine protocols (docs/reference/engine-protocol.md), which a router serves if it is told to.
ENGINE_SERVICES = SGLANG_SERVICE, VLLM_SERVICE = "sglang.grpc.scheduler.SglangScheduler", "vllm.grpc.engine.VllmEngine"
REFLECTION_SERVICE = "grpc.reflection.v1alpha.ServerReflection"

# Runners of batches call for the tenants that made these.
_RUNNERS = frozenset({Role.BATCHES})
_GENERATE = Permission(GENERATE, {Port.PUBLIC: _SAMPLERS, Port.OPERATORS: _RUNNERS})
_TOKENIZE = Permission(TOKENIZE, _GENERATE.roles)
_BATCH = Permission(GENERATE, {Port.PUBLIC: _USERS, Port.OPERATORS: _RUNNERS})
# Operators upload adapters too: those of all tenants, of the tenant `shared`.
_READ_ADAPTERS = Permission(ADAPTERS_READ, {Port.PUBLIC: _USERS, Port.OPERATORS: _WATCHERS})
_WRITE_ADAPTERS = Permission(ADAPTERS_WRITE, {Port.PUBLIC: _ADMINS, Port.OPERATORS: _OPERATORS})
_PUSH_ADAPTERS = replace(_WRITE_ADAPTERS, roles={Port.PUBLIC: _PUSHERS, Port.OPERATORS: _OPERATORS})
_READ_CLUSTER = Permission(CLUSTER_READ, {Port.OPERATORS: _WATCHERS})
_WRITE_CLUSTER = Permission(CLUSTER_WRITE, {Port.OPERATORS: _OPERATORS})
# A tenant sees its own jobs.
_READ_JOBS = Permission(JOBS_READ, {Port.PUBLIC: _USERS, Port.OPERATORS: _WATCHERS})
_WRITE_TENANTS = Permission(TENANTS_WRITE, {Port.OPERATORS: _OPERATORS})
# A tenant's administrator sees and changes the keys of its tenant.
_WRITE_KEYS = Permission(KEYS_WRITE, {Port.PUBLIC: _ADMINS, Port.OPERATORS: _OPERATORS})
_READ_PLANS = Permission(PLANS_READ, {Port.OPERATORS: _WATCHERS})
_WRITE_PLANS = Permission(PLANS_WRITE, {Port.OPERATORS: _OPERATORS})
_WRITE_MODELS = Permission(MODELS_WRITE, {Port.OPERATORS: _OPERATORS})
_READ_MODELS = Permission(MODELS_READ, {Port.OPERATORS: _WATCHERS | _PARTS})
_COMMAND_ADAPTER = _WRITE_CLUSTER.recorded("adapter", "worker_id")
_MOVE_RELEASE = _WRITE_ADAPTERS.recorded("name", answer=("release.state", "release.digest"))


# What all engine protocols have.
_ENGINE = {
    **dict.fromkeys(("Generate", "Embed", "Abort"), _GENERATE),
    **dict.fromkeys(("GetModelInfo", "GetServerInfo", "GetTokenizer", "HealthCheck"), _TOKENIZE),
    "GetLoads": _READ_CLUSTER,
    # The token ids of prompts and answers: a tenant sees its own, and auditors none.
    "SubscribeKvEvents": Permission(GENERATE, {Port.PUBLIC: _USERS, Port.OPERATORS: _OPERATORS}),
    **dict.fromkeys(("FlushCache", "StartProfile", "StopProfile"), _WRITE_CLUSTER),
}


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
            "Decide": _GENERATE,
            "Rerank": _GENERATE,
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
            "UploadRevision": _PUSH_ADAPTERS.recorded(answer=("revision.name", "created")),
            "ImportRevision": _PUSH_ADAPTERS.recorded(
                "adapter", "source", answer=("imported.revision.name", "imported.created")
            ),
            "ExportRevision": _WRITE_ADAPTERS.recorded("name", "destination", answer=("exported.pin",)),
            "CertifyRevision": _WRITE_ADAPTERS.recorded("name", "certificate.quantization", "calibration.temperature"),
            "ValidateAdapter": _WRITE_ADAPTERS,
            "SetAlias": _WRITE_ADAPTERS.recorded("adapter", "alias", "digest"),
            "DeleteAdapter": _PUSH_ADAPTERS.recorded("name", "purge"),
            "ListAdapters": _READ_ADAPTERS,
            "ListRevisions": _READ_ADAPTERS,
            # Names of all tenants' adapters, as GetTraffic has them.
            "FindRevisions": _READ_CLUSTER,
            "GetAdapter": Permission(
                ADAPTERS_READ, {Port.PUBLIC: _USERS, Port.OPERATORS: _WATCHERS | _ROUTERS | _RUNNERS}
            ),
            "ListAdapterChanges": Permission(ADAPTERS_READ, {Port.OPERATORS: _ROUTERS}),
            "DownloadRevision": Permission(ADAPTERS_READ, {Port.PUBLIC: _USERS, Port.OPERATORS: _PARTS}),
            "RegisterBaseModel": _WRITE_MODELS.recorded(answer=("model.name", "model.digest", "model.state")),
            "PromoteBaseModel": _WRITE_MODELS.recorded("name", "digest"),
            "GetBaseModel": _READ_MODELS,
            "ListBaseModels": _READ_MODELS,
            "DownloadBaseModel": _READ_MODELS,
        },
    ),
    **_of(
        "loraplex.adapters.v1.ReleaseService",
        {
            "CreateRelease": _WRITE_ADAPTERS.recorded(
                "revision", "origin.source", "origin.pin", answer=("release.name", "release.signer")
            ),
            "QualifyRelease": _MOVE_RELEASE,
            "PromoteRelease": _MOVE_RELEASE,
            "AbortRelease": _MOVE_RELEASE,
            "RollBackRelease": _MOVE_RELEASE,
            "GetRelease": _READ_ADAPTERS,
            "ListReleases": _READ_ADAPTERS,
            "WatchReleases": _READ_ADAPTERS,
            "ReportOutcomes": Permission(OUTCOMES, {Port.OPERATORS: _ROUTERS}),
        },
    ),
    **_of(
        "loraplex.batches.v1.BatchService",
        {
            **dict.fromkeys(("GetFile", "ListFiles", "DownloadFile", "GetBatch", "ListBatches"), _BATCH),
            "UploadFile": _BATCH.recorded(answer=("file.name", "file.bytes")),
            "DeleteFile": _BATCH.recorded("name"),
            "CreateBatch": _BATCH.recorded("input_file", "endpoint", answer=("batch.name",)),
            "CancelBatch": _BATCH.recorded("name"),
            **dict.fromkeys(("LeaseBatch", "ReportBatch"), Permission(GENERATE, {Port.OPERATORS: _RUNNERS})),
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
            "DrainWorker": _WRITE_CLUSTER.recorded("worker_id"),
            "DrainCell": _WRITE_CLUSTER.recorded("cell"),
            "OpenCell": _WRITE_CLUSTER.recorded("cell"),
            "WarmAdapter": _COMMAND_ADAPTER,
            "PinAdapter": _COMMAND_ADAPTER,
            "UnpinAdapter": _COMMAND_ADAPTER,
            "PurgeTenant": _WRITE_TENANTS.recorded("tenant", answer=("removed_count", "left_count", "error_count")),
            "ListQuarantine": _READ_JOBS,
            "LiftQuarantine": _WRITE_CLUSTER.recorded("tenant", answer=("removed_count",)),
            "RotateResumeKeys": _WRITE_CLUSTER.recorded(answer=("valid_count",)),
            "WithdrawResumeKeys": _WRITE_CLUSTER.recorded(answer=("removed_count",)),
        },
    ),
    **_of(
        "loraplex.admin.v1.KeyService",
        {
            "CreateKey": _WRITE_KEYS.recorded(
                "tenant", "role", "scopes", "label", "ttl", answer=("key.key_id", "key.role", "key.expire_time")
            ),
            # Another secret of a key may have more scopes than the caller.
            "RotateKey": replace(_WRITE_KEYS, roles={Port.OPERATORS: _OPERATORS}).recorded(
                "key_id", "grace", answer=("key.tenant", "key.former_expire_time")
            ),
            "RevokeKey": _WRITE_KEYS.recorded("key_id", answer=("key.tenant",)),
            "ListKeys": Permission(KEYS_READ, {Port.PUBLIC: _ADMINS, Port.OPERATORS: _WATCHERS}),
            "ListKeyChanges": Permission(KEYS_READ, {Port.OPERATORS: _ROUTERS}),
        },
    ),
    **_of(
        "loraplex.admin.v1.PlanService",
        {
            "SetPlan": _WRITE_PLANS.recorded(
                *(f"plan.{field.name}" for field in Plan.DESCRIPTOR.fields if field.name != "prices"),
                *("plan.prices.currency", "plan.prices.of"),
                answer=("plan.etag",),
            ),
            "DeletePlan": _WRITE_PLANS.recorded("name"),
            "GetPlan": _READ_PLANS,
            # A tenant's administrator sees the plans that limit its tenant.
            "ListPlans": Permission(PLANS_READ, {Port.PUBLIC: _ADMINS, Port.OPERATORS: _WATCHERS}),
            "ListPlanChanges": Permission(PLANS_READ, {Port.OPERATORS: _ROUTERS}),
        },
    ),
    **_of(
        "loraplex.admin.v1.AccountService",
        {
            "SaveAccounts": Permission(ACCOUNTS, {Port.OPERATORS: _ROUTERS}),
            "ListAccounts": Permission(ACCOUNTS, {Port.PUBLIC: _ADMINS, Port.OPERATORS: _WATCHERS | _ROUTERS}),
        },
    ),
    **_of(
        "loraplex.admin.v1.TenantService",
        {
            "PurgeTenant": _WRITE_TENANTS.recorded("tenant", answer=("removed_count",)),
            "ListGoneRevisions": Permission(ADAPTERS_READ, {Port.OPERATORS: frozenset({Role.WORKER})}),
        },
    ),
    **_of(
        "loraplex.admin.v1.GrantService",
        {
            "CreateGrant": _WRITE_ADAPTERS.recorded("adapter", "tenant", "ttl", answer=("grant.adapter",)),
            "DeleteGrant": _WRITE_ADAPTERS.recorded("adapter", "tenant"),
            "ListGrants": Permission(ADAPTERS_READ, {Port.PUBLIC: _ADMINS, Port.OPERATORS: _WATCHERS}),
        },
    ),
    **_of("loraplex.relay.v1.RelayService", {"Connect": Permission(RELAY, {Port.RELAY: frozenset({Role.WORKER})})}),
    **_of(
        SGLANG_SERVICE,
        {
            "ListLoadedLoRAAdapters": _READ_ADAPTERS,
            "LoadLoRAAdapter": _WRITE_CLUSTER.recorded("lora_name", "pinned"),
            "UnloadLoRAAdapter": _WRITE_CLUSTER.recorded("lora_name"),
            **_ENGINE,
        },
    ),
    **_of(VLLM_SERVICE, _ENGINE),
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
