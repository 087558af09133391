"""Plans: what tenants and API keys may use; docs/guides/quotas.md explains the fields.

A plan's name is `default`, `tenants/acme` or `keys/0123456789abcdef`. The one named `prices` has the prices of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.names import SHARED, AdapterName, check_base_name, parse_adapter_name
from loraplex.runtime.rpc.errors import InvalidField

# Interval in seconds between a router's looks for changes: one holds within a second.
LOOK_S = 0.5
DEFAULT, PRICES = "default", "prices"
# Parts of the currency's unit in which money is counted.
NANO = 10**9
# Maximum budget in units of the currency, and price in nano-units of a token: Redis's scripts count nine million units.
_MOST_BUDGET, _MOST_PRICE = 1_000_000, NANO
# Maximum number of prices: a router reads all of them in one message.
_PRICES = 10_000
# Lowest priority that a request can have, and so the lowest ceiling; other limits begin at 0.
_LEAST_PRIORITY = -100
# Maximum value of a limit that is a whole number: Redis's scripts count exactly up to 2^53, with several added up.
_MOST = (1 << 50) - 1


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a token of a prompt, of one that a prefix cache had, and of one of an answer.

    In nano-units of the currency, which are thousandths of it for a million tokens.
    """

    input: int = 0
    cached: int = 0
    output: int = 0


FREE = Price()


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in a currency, by the name of a base model, or by the full name of an adapter, which comes first."""

    currency: str
    prices: Mapping[str, Price]

    def of(self, model: str, revision: str) -> Price:
        """Return the price of a call's tokens; `revision` is the full name of its adapter's, or empty."""
        return self.prices.get(revision.partition("/revisions/")[0]) or self.prices.get(model, FREE)


@dataclass(frozen=True, slots=True)
class Plan:
    """The quotas of a tenant or an API key, and its default model. None: no limit, a weight of 1, and QUEUE_SHARE."""

    concurrent_streams: int | None = None
    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    # In units of the currency: the cost of tokens, and the cost at which a warning goes.
    budget_per_month: float | None = None
    budget_warning: float | None = None
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
    # Base models and adapters that calls may use, where `*` stands for any characters; None: all, NOTHING alone: none.
    allowed_models: tuple[str, ...] | None = None
    allowed_adapters: tuple[str, ...] | None = None
    # Of the plan PRICES alone.
    prices: Prices | None = None

    def allows(self, field: str, *names: str) -> bool:
        """Tell whether a field allows what has one of the names."""
        patterns: tuple[str, ...] | None = getattr(self, field)
        return patterns is None or any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


UNLIMITED = Plan()
# Queue share of a tenant whose plan has none: it leaves half of the queue to others.
QUEUE_SHARE = 0.5
FIELDS = tuple(field.name for field in fields(Plan) if field.name != "prices")
# Fields that are money, shares or weights: numbers that need not be whole.
BUDGET_FIELDS = frozenset({"budget_per_month", "budget_warning"})
REAL_FIELDS = BUDGET_FIELDS | {"queue_share", "weight"}
# Fields that are names.
NAME_FIELDS = frozenset({"default_model"})
# Fields that are lists of names, and the entry that no name is like; maximum characters of a list: a message has the
# plans of 1,000 tenants.
LIST_FIELDS = frozenset({"allowed_models", "allowed_adapters"})
NOTHING, _LIST_CHARACTERS = "-", 1_500
# Minimum and maximum weight of a tenant or a key: what is counted in tokens over the weight stays exact.
WEIGHTS = (0.001, 1_000.0)


def plan_name(tenant: str = "", key_id: str = "") -> str:
    """Return the name of the plan of a tenant or of a key."""
    return f"keys/{key_id}" if key_id else f"tenants/{tenant}"


def nano(amount: float) -> int:
    """Return an amount of money in nano-units, as its decimal digits say it."""
    return int(Decimal(repr(amount)) * NANO)


def money(nanos: int) -> str:
    """Return an amount of nano-units in units of the currency, with 9 decimals."""
    return f"{nanos // NANO}.{nanos % NANO:09}"


def check_prices(prices: Prices) -> Prices:
    """Return prices that may be set. Raises InvalidField."""
    if not re.fullmatch(r"[A-Za-z]{1,16}", prices.currency):
        raise InvalidField("prices.currency", "name the unit of the prices by letters, such as EUR")
    if len(prices.prices) > _PRICES:
        raise InvalidField("prices", f"{len(prices.prices)} prices; at most {_PRICES}")
    for name, price in prices.prices.items():
        try:
            parse_adapter_name(name, "") if name.startswith("tenants/") else check_base_name(name)
        except ArtifactError as error:
            raise InvalidField("prices", error.message) from error
        if not all(0 <= one <= _MOST_PRICE for one in (price.input, price.cached, price.output)):
            raise InvalidField(f"prices.{name}", f"a price is from 0 to {_MOST_PRICE // 1000} for a million tokens")
        if price.cached > price.input:
            raise InvalidField(f"prices.{name}", "cached tokens cost more than input, of which they are a part")
    return prices


def windows_at(time_ms: int) -> dict[str, int]:
    """Return the numbers of the windows of quotas that a time in milliseconds since 1970 belongs to."""
    day = datetime.fromtimestamp(time_ms / 1000, UTC)
    return {"minute": time_ms // 60_000, "day": time_ms // 86_400_000, "month": 12 * day.year + day.month - 1}


def default_model(*plans: Plan) -> str:
    """Return the base model of a call that names none, whose plans these are, the first to be asked first.

    Empty: none of them says one.
    """
    return next((plan.default_model for plan in plans if plan.default_model), "")


def names_of(adapter: AdapterName, tenant: str) -> tuple[str, ...]:
    """Return the names that a tenant's plan may give an adapter: a short one too if it is the tenant's or shared."""
    return (str(adapter), *([adapter.adapter] if adapter.tenant in {tenant, SHARED} else []))


def plan_of(values: Mapping[str, Any]) -> Plan:
    """Return the plan of values that were checked."""
    lists: dict[str, Any] = {field: tuple(values[field]) for field in LIST_FIELDS & values.keys()}
    return Plan(**{**values, **lists})


def make_plan(name: str, values: Mapping[str, Any]) -> Plan:
    """Return the plan with these values. Raises InvalidField; `name` is what the field's path begins with."""
    for field, value in values.items():
        path = f"{name}.{field}"
        if field not in FIELDS:
            raise InvalidField(path, f"not a field of a plan ({', '.join(sorted(FIELDS))})")
        if field in NAME_FIELDS | LIST_FIELDS:
            try:
                _check_names(field, value)
            except ArtifactError as error:
                raise InvalidField(path, error.message) from error
            continue
        if why := _why_refused(field, value):
            raise InvalidField(path, f"{value!r} is not {why}")
    plan = plan_of(values)
    warning, budget = plan.budget_warning, plan.budget_per_month
    if warning is not None and budget is not None and warning >= budget:
        raise InvalidField(f"{name}.budget_warning", f"{warning} is not below budget_per_month, {budget}")
    if plan.default_model and not plan.allows("allowed_models", plan.default_model):
        raise InvalidField(f"{name}.default_model", f"{plan.default_model} is not among allowed_models; add it there")
    return plan


def _check_names(field: str, value: Any) -> None:
    """Raise ArtifactError where a value is not the name, or the names, that a field takes."""
    if field in NAME_FIELDS:
        check_base_name(value if isinstance(value, str) else repr(value))
    elif isinstance(value, str) or not isinstance(value, Sequence) or {*map(type, value)} != {str}:
        raise ArtifactError(field, f"{value!r} is not a list of names")
    elif len(" ".join(value)) > _LIST_CHARACTERS:
        raise ArtifactError(field, f"is longer than {_LIST_CHARACTERS:,} characters; * in a name stands for any")
    else:
        for name in {one.replace("*", "x") for one in value} - {NOTHING}:
            check_base_name(name) if field == "allowed_models" else parse_adapter_name(name, SHARED)


def _why_refused(field: str, value: Any) -> str:
    """Return what a value of a field that is a number is not; empty: it is allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "a number"
    if field == "queue_share":
        return "" if 0 < value <= 1 else "a share above 0, up to 1"
    if field == "weight":
        return "" if WEIGHTS[0] <= value <= WEIGHTS[1] else f"from {WEIGHTS[0]:g} to {WEIGHTS[1]:g}"
    if field in BUDGET_FIELDS:
        is_allowed = 0 <= value <= _MOST_BUDGET and not Decimal(repr(value)) * NANO % 1
        return "" if is_allowed else f"from 0 to {_MOST_BUDGET} with at most 9 decimals"
    least = _LEAST_PRIORITY if field == "priority_ceiling" else 0
    is_allowed = isinstance(value, int) and least <= value <= _MOST
    return "" if is_allowed else f"a whole number from {least} to {_MOST}"
