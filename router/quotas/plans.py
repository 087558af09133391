"""Plans: what each tenant may use. They are read from a TOML file, and again when it changes; see docs/quotas.md.

[default]                           # tenants without a table of their own
requests_per_minute = 60
[tenants.acme]
tokens_per_day = 2_000_000
"""

from __future__ import annotations

import asyncio
import logging
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from broker.ledger import TokenLimits

log = logging.getLogger(__name__)

# Interval in seconds between looks at the file: a change holds within a second.
LOOK_S = 0.5


class PlansError(Exception):
    """A plans file that cannot be read; the message is one line that names the table and the field."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The quotas of a tenant. None: no limit, and for the weight what --tenant-weights says."""

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
    # Twice the weight gets twice the service while tenants wait.
    weight: float | None = None

    @property
    def limits(self) -> TokenLimits | None:
        """Return the limits that the ledger keeps; None where there are none."""
        limits = TokenLimits(
            self.concurrent_streams,
            self.requests_per_minute,
            self.input_tokens_per_minute,
            self.output_tokens_per_minute,
            self.tokens_per_day,
            self.tokens_per_month,
        )
        return None if limits == TokenLimits() else limits


UNLIMITED = Plan()
_FIELDS = {field.name for field in fields(Plan)}
_TABLES = {"default", "tenants"}


class Plans:
    """The plans of all tenants; without a file nobody has a limit."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file. Raises PlansError."""
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._last_logged = ""
        self._default, self._tenants = UNLIMITED, dict[str, Plan]()
        # The limits of both kinds, since they are asked for with every request.
        self._default_limits: TokenLimits | None = None
        self._limits = dict[str, TokenLimits | None]()
        if path is not None:
            self._stamp = _stamp_of(path)
            self._take(_read(path))

    @property
    def tenants(self) -> Mapping[str, Plan]:
        """Return the plans of tenants that have one of their own."""
        return self._tenants

    @property
    def has_limits(self) -> bool:
        """Return whether the ledger keeps limits of any tenant."""
        return self._default_limits is not None or any(self._limits.values())

    def of(self, tenant: str) -> Plan:
        """Return a tenant's plan."""
        return self._tenants.get(tenant, self._default)

    def limits_of(self, tenant: str) -> TokenLimits | None:
        """Return the limits that the ledger keeps for a tenant; None: none."""
        return self._limits.get(tenant, self._default_limits)

    def weight_of(self, tenant: str) -> float | None:
        """Return the weight of a tenant's plan, if it has one."""
        return self.of(tenant).weight

    async def follow(self) -> None:
        """Read the file again whenever it changes; never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Read the file again if it has changed; one with a fault changes nothing."""
        if self._path is None:
            return
        try:
            stamp = _stamp_of(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._take(_read(self._path))
        except PlansError as error:
            if str(error) != self._last_logged:
                log.warning("the former plans stay: %s", error)
            self._last_logged = str(error)
        else:
            self._last_logged = ""
            log.info("read the plans of %d tenants again", len(self._tenants))

    def _take(self, read: tuple[Plan, dict[str, Plan]]) -> None:
        self._default, self._tenants = read
        self._default_limits = self._default.limits
        self._limits = {tenant: plan.limits for tenant, plan in self._tenants.items()}


def _stamp_of(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise PlansError(f"--plans {path}: {error.strerror}") from error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _read(path: Path) -> tuple[Plan, dict[str, Plan]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlansError(f"--plans {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlansError(f"--plans {path}: no TOML: {error}") from error
    if unknown := sorted(set(tables) - _TABLES):
        raise PlansError(f"--plans {path}: {unknown[0]}: write [default] or [tenants.NAME]")
    default = _plan(path, "default", tables.get("default", {}))
    tenants = tables.get("tenants", {})
    if not isinstance(tenants, dict):
        raise PlansError(f"--plans {path}: tenants: write [tenants.NAME]")
    return default, {name: _plan(path, f"tenants.{name}", table) for name, table in tenants.items()}


def _plan(path: Path, where: str, table: Any) -> Plan:
    if not isinstance(table, dict):
        raise PlansError(f"--plans {path}: {where}: write [{where}]")
    for name, value in table.items():
        if name not in _FIELDS:
            raise PlansError(f"--plans {path}: {where}.{name}: not a field of a plan ({', '.join(sorted(_FIELDS))})")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise PlansError(f"--plans {path}: {where}.{name}: {value!r} is not a number")
        if name == "weight":
            if not 0 < value < math.inf:
                raise PlansError(f"--plans {path}: {where}.weight: {value} is not above 0")
        elif not isinstance(value, int) or not -100 <= value < 1 << 50 or (value < 0 and name != "priority_ceiling"):
            raise PlansError(f"--plans {path}: {where}.{name}: {value} is not a whole number from 0 up")
    return Plan(**table)
