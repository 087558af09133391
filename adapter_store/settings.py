"""The adapter store's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rpc.identity.access import AccessSettings
from rpc.settings import setting
from telemetry.audit.log import FILE_HELP
from telemetry.logging import FORMAT_HELP, FORMAT_VARIABLE, LEVEL_HELP, LEVEL_VARIABLE, check_logging
from telemetry.metrics import PORT_HELP

# Answers to requests for an adapter whose certificate breaks the limits: an error, or a warning in the log.
REFUSE, WARN = "refuse", "warn"


@dataclass(frozen=True)
class StoreSettings(AccessSettings):
    """Keeps adapters and base models' manifests in a local directory and serves them over gRPC."""

    data: Path = setting("directory that holds everything; made when it is missing")  # a field
    host: str = setting("address to listen on", "127.0.0.1")
    port: int = setting("port to listen on, 0 for one that the system chooses", 50052)
    max_adapter_bytes: int = setting("largest safetensors file accepted", 4 * 1024**3)
    keep_deleted_s: float = setting(
        "seconds for which a deleted adapter's files can still be fetched, for answers that run on it: at least the "
        "longest answer",
        3600.0,
    )
    fitness_min_agreement: float = setting(
        "least share of equal greedy tokens that an adapter's certificate needs on a quantized base", 0.8
    )
    fitness_max_kl: float = setting(
        "largest mean divergence in nats that an adapter's certificate may have on a quantized base", 0.2
    )
    fitness_breach: str = setting(
        "routers refuse adapters beyond these limits on such a base, or warn of them: refuse or warn", REFUSE
    )
    plans: str = setting(
        "a TOML file with the plans of tenants and keys (docs/quotas.md), read again when it changes; empty: the plans "
        "that operators set with `loraplex plans`",
        "",
    )
    metrics_port: int = setting(PORT_HELP, 0)
    log_format: str = setting(FORMAT_HELP, "text", variable=FORMAT_VARIABLE)
    log_level: str = setting(LEVEL_HELP, "info", variable=LEVEL_VARIABLE)
    bootstrap_key: str = setting("file with the first operator's API key; `loraplex keys bootstrap` makes it", "")
    audit: str = setting(FILE_HELP, "")
    insecure_tenants: bool = setting("listen beyond loopback although callers name their tenant unproved", False)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"--port: {self.port} is not a port")
        if self.max_adapter_bytes < 1:
            raise ValueError(f"--max-adapter-bytes: {self.max_adapter_bytes} is not a size")
        if not 0 <= self.keep_deleted_s < math.inf:
            raise ValueError(f"--keep-deleted-s: {self.keep_deleted_s} is not a time")
        if not 0 <= self.fitness_min_agreement <= 1:
            raise ValueError(f"--fitness-min-agreement: {self.fitness_min_agreement} is not a share from 0 to 1")
        if not self.fitness_max_kl >= 0:
            raise ValueError(f"--fitness-max-kl: {self.fitness_max_kl} is not a number from 0")
        if self.fitness_breach not in {REFUSE, WARN}:
            raise ValueError(f"--fitness-breach: {self.fitness_breach} is neither {REFUSE} nor {WARN}")
        check_logging(self.log_format, self.log_level)
        self.check_access(self.host, self.insecure_tenants)
        if not self.tls_cert:
            if self.bootstrap_key:
                raise ValueError("--bootstrap-key: needs --tls-cert, --tls-key and --tls-ca")
        elif self.operator_mtls_port is None:
            raise ValueError("--operator-mtls-port: give it with --tls-cert; routers and workers come in there")
