"""Plans: what tenants and API keys may use; docs/guides/quotas.md explains the fields.

A plan's name is `default`, `tenants/acme` or `keys/0123456789abcdef`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.names import check_base_name
from loraplex.runtime.rpc.errors import InvalidField

# Interval in seconds between a router's looks for changes: one holds within a second.
LOOK_S = 0.5
DEFAULT = "default"
# Lowest priority that a request can have, and so the lowest ceiling; other limits begin at 0.
_LEAST_PRIORITY = -100
# Maximum value of a limit that is a whole number: Redis's scripts count exactly up to 2^53, with several added up.
_MOST = (1 << 50) - 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The quotas of a tenant or an API key, and its default model. None: no limit, a weight of 1, and QUEUE_SHARE."""

    concurrent_streams: int | None = None
    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    # Maximum tokens of a prompt and its answer together, and maximum answers that one request computes (n or best_of).
    context_tokens: int | None = None
    answers_per_request: int | None = None
    # Priority that a request's own is lowered to.
    priority_ceiling: int | None = None
    # Maximum share of a model's queue that waiting jobs of the tenant, or of the key, may take, from above 0 to 1.
    queue_share: float | None = None
    # Twice the weight gets twice the service while tenants wait; of a key, among the keys of its tenant.
    weight: float | None = None
    # At the adapter store: adapters, bytes of the files of revisions, and uploads at the same time. A key's are those
    # that came with it.
    adapters: int | None = None
    adapter_bytes: int | None = None
    uploads_at_once: int | None = None
    # Base model of a call that names none; None: the one of the tenant's plan, then of `default`.
    default_model: str | None = None


UNLIMITED = Plan()
# Queue share of a tenant whose plan has none: it leaves half of the queue to others.
QUEUE_SHARE = 0.5
FIELDS = tuple(field.name for field in fields(Plan))
# Fields that are shares or weights: numbers that need not be whole.
REAL_FIELDS = frozenset({"queue_share", "weight"})
# Fields that are names.
NAME_FIELDS = frozenset({"default_model"})
# Minimum and maximum weight of a tenant or a key: what is counted in tokens over the weight stays exact.
WEIGHTS = (0.001, 1_000.0)


def plan_name(tenant: str = "", key_id: str = "") -> str:
    """Return the name of the plan of a tenant or of a key."""
    return f"keys/{key_id}" if key_id else f"tenants/{tenant}"


def windows_at(time_ms: int) -> dict[str, int]:
    """Return the numbers of the windows of quotas that a time in milliseconds since 1970 belongs to."""
    day = datetime.fromtimestamp(time_ms / 1000, UTC)
    return {"minute": time_ms // 60_000, "day": time_ms // 86_400_000, "month": 12 * day.year + day.month - 1}


def default_model(*plans: Plan) -> str:
    """Return the base model of a call that names none, whose plans these are, the first to be asked first.

    Empty: none of them says one.
    """
    return next((plan.default_model for plan in plans if plan.default_model), "")


def make_plan(name: str, values: Mapping[str, Any]) -> Plan:
    """Return the plan with these values. Raises InvalidField; `name` is what the field's path begins with."""
    for field, value in values.items():
        path = f"{name}.{field}"
        if field not in FIELDS:
            raise InvalidField(path, f"not a field of a plan ({', '.join(sorted(FIELDS))})")
        if field in NAME_FIELDS:
            try:
                check_base_name(value if isinstance(value, str) else repr(value))
            except ArtifactError as error:
                raise InvalidField(path, error.message) from error
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidField(path, f"{value!r} is not a number")
        if field == "queue_share":
            if not 0 < value <= 1:
                raise InvalidField(path, f"{value} is not a share above 0, up to 1")
        elif field == "weight":
            if not WEIGHTS[0] <= value <= WEIGHTS[1]:
                raise InvalidField(path, f"{value} is not from {WEIGHTS[0]:g} to {WEIGHTS[1]:g}")
        else:
            least = _LEAST_PRIORITY if field == "priority_ceiling" else 0
            if not isinstance(value, int) or not least <= value <= _MOST:
                raise InvalidField(path, f"{value} is not a whole number from {least} to {_MOST}")
    return Plan(**values)
