"""The operator's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from loraplex.runtime.rpc.settings import check_bounds, setting
from loraplex.runtime.telemetry.logging import FORMAT_HELP, FORMAT_VARIABLE, LEVEL_HELP, LEVEL_VARIABLE, check_logging
from loraplex.runtime.telemetry.metrics import PORT_HELP

_NAMESPACE = re.compile(r"([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)(?:=([a-z0-9][a-z0-9._-]{0,62}))?")


@dataclass(frozen=True)
class OperatorSettings:
    """Imports adapters and promotes base models as the Kubernetes objects LoraAdapter and BaseModel say."""

    namespaces: str = setting(
        "namespaces to watch, separated by commas: NAMESPACE, or NAMESPACE=TENANT for adapters of this tenant alone, "
        "repeated for further tenants"
    )
    store: str = setting(
        "address of the store, with credentials of its --operator-port; also LORAPLEX_STORE_ADDRESS",
        "127.0.0.1:50052",
        variable="LORAPLEX_STORE_ADDRESS",
    )
    look_s: float = setting(
        "seconds between looks at an object that needs no change; others are looked at sooner", 60.0, above=0
    )
    host: str = setting("address of the metrics", "127.0.0.1")
    metrics_port: int = setting(PORT_HELP, 0)
    log_format: str = setting(FORMAT_HELP, "text", variable=FORMAT_VARIABLE)
    log_level: str = setting(LEVEL_HELP, "info", variable=LEVEL_VARIABLE)

    def __post_init__(self) -> None:
        """Raise ValueError on a value out of range."""
        check_logging(self.log_format, self.log_level)
        check_bounds(self)
        self.tenants_of()

    def tenants_of(self) -> Mapping[str, frozenset[str]]:
        """Return by namespace the tenants that its adapters may be of; none: every tenant. Raises ValueError."""
        found: dict[str, set[str]] = {}
        for text in self.namespaces.split(","):
            if (match := _NAMESPACE.fullmatch(text.strip())) is None:
                raise ValueError(
                    f"--namespaces {text.strip()!r}: write NAMESPACE or NAMESPACE=TENANT, such as llm=acme"
                )
            found.setdefault(match[1], set()).add(match[2] or "")
        for namespace, tenants in found.items():
            if "" in tenants and len(tenants) > 1:
                raise ValueError(f"--namespaces {namespace}: is there with a tenant and without one")
        return {namespace: frozenset(tenants - {""}) for namespace, tenants in found.items()}
