"""The methods that the audit log has, and which fields of their messages: never a secret, a prompt or an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loraplex.admin.v1.plans_pb2 import Plan

from rpc.identity.permissions import PERMISSIONS, SGLANG_SERVICE


@dataclass(frozen=True, slots=True)
class Audited:
    """The fields of a method's request and answer that its records have, as paths such as `key.key_id`."""

    request: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()


def _of(service: str, rows: Mapping[str, Audited]) -> dict[str, Audited]:
    return {f"/loraplex.{service}/{method}": row for method, row in rows.items()}


_PLAN = tuple(f"plan.{field.name}" for field in Plan.DESCRIPTOR.fields)
_ADAPTER_COMMAND = Audited(("adapter", "worker_id"))

AUDITED: Mapping[str, Audited] = {
    **_of(
        "admin.v1.KeyService",
        {
            "CreateKey": Audited(
                ("tenant", "role", "scopes", "label", "ttl"), ("key.key_id", "key.role", "key.expire_time")
            ),
            "RotateKey": Audited(("key_id", "grace"), ("key.tenant", "key.former_expire_time")),
            "RevokeKey": Audited(("key_id",), ("key.tenant",)),
        },
    ),
    **_of("admin.v1.TenantService", {"PurgeTenant": Audited(("tenant",), ("removed_count",))}),
    **_of(
        "admin.v1.GrantService",
        {
            "CreateGrant": Audited(("adapter", "tenant", "ttl"), ("grant.adapter",)),
            "DeleteGrant": Audited(("adapter", "tenant")),
        },
    ),
    **_of("admin.v1.PlanService", {"SetPlan": Audited(_PLAN, ("plan.etag",)), "DeletePlan": Audited(("name",))}),
    **_of(
        "adapters.v1.AdapterService",
        {
            "UploadRevision": Audited(answer=("revision.name", "created")),
            "CertifyRevision": Audited(("name", "certificate.quantization")),
            "SetAlias": Audited(("adapter", "alias", "digest")),
            "DeleteAdapter": Audited(("name", "purge")),
            "RegisterBaseModel": Audited(answer=("model.name", "model.digest")),
        },
    ),
    **_of(
        "cluster.v1.ClusterService",
        {
            "DrainWorker": Audited(("worker_id",)),
            "WarmAdapter": _ADAPTER_COMMAND,
            "PinAdapter": _ADAPTER_COMMAND,
            "UnpinAdapter": _ADAPTER_COMMAND,
            "PurgeTenant": Audited(("tenant",), ("removed_count", "left_count", "error_count")),
        },
    ),
    f"/{SGLANG_SERVICE}/LoadLoRAAdapter": Audited(("lora_name", "pinned")),
    f"/{SGLANG_SERVICE}/UnloadLoRAAdapter": Audited(("lora_name",)),
}
# Methods that may change nothing, although the scope of their permission allows it to others.
UNCHANGING = frozenset(
    {
        "/loraplex.adapters.v1.AdapterService/ValidateAdapter",
        # Not served, so that they change nothing.
        *(f"/{SGLANG_SERVICE}/{method}" for method in ("FlushCache", "StartProfile", "StopProfile")),
    }
)
# Reasons for which a call that changes nothing is recorded as refused: somebody tried another's credential or token.
STOLEN = frozenset({"RESUME_TOKEN_INVALID", "RESUME_TOKEN_MISMATCH", "RESUME_TOKEN_ENDED"})
# Methods that may end with one of these.
STEALABLE = frozenset({"/loraplex.inference.v1.InferenceService/Resume"})


def missing() -> list[str]:
    """Return the methods that may change something and that no record would be made of."""
    changing = {method for method, row in PERMISSIONS.items() if row.scope.endswith(".write")}
    return sorted(changing - set(AUDITED) - UNCHANGING)
