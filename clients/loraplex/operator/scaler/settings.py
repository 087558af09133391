"""The scaler's settings."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from loraplex.operator.scaler.policy import Bounds, PoolRules
from loraplex.runtime.rpc.settings import check_bounds, setting
from loraplex.runtime.rpc.tls import CA_HELP, CERT_HELP, KEY_HELP, TlsFiles, tls_of
from loraplex.runtime.telemetry.logging import FORMAT_HELP, FORMAT_VARIABLE, LEVEL_HELP, LEVEL_VARIABLE, check_logging
from loraplex.runtime.telemetry.metrics import PORT_HELP

# Interval in seconds between looks at the cluster: Kubernetes' autoscaler asks every 15 s.
LOOK_S = 5.0
_POOL = re.compile(r"([^=,@\s]+)(?:@([^=,@\s]+))?=(\d+)-(\d+)")


@dataclass(frozen=True)
class ScalerSettings:
    """Tells KEDA and Prometheus how many workers each model needs, as a client of routers."""

    pools: str = setting(
        "minimum and maximum workers of each model, such as qwen=0-6, separated by commas; with cells qwen@main=0-6"
    )
    router: str = setting(
        "addresses of the routers (--operator-port, with credentials), separated by commas; also LORAPLEX_ADDRESS",
        "127.0.0.1:50051",
        variable="LORAPLEX_ADDRESS",
    )
    wait_s: float = setting("maximum seconds that a request should wait for a worker", 10.0, above=0)
    idle_s: float = setting("seconds without work after which a model with minimum 0 has no worker", 300.0, above=0)
    worker_rate: float = setting(
        "first estimate of a worker's work per second: prompt tokens + 2 x answer tokens",
        1_000.0,
        above=0,
    )
    host: str = setting("address to listen on", "127.0.0.1")
    port: int = setting("port of KEDA's external scaler; 0: any free port", 50055)
    tls_cert: str = setting(CERT_HELP, "")
    tls_key: str = setting(KEY_HELP, "")
    tls_ca: str = setting(CA_HELP, "")
    metrics_port: int = setting(PORT_HELP, 0)
    log_format: str = setting(FORMAT_HELP, "text", variable=FORMAT_VARIABLE)
    log_level: str = setting(LEVEL_HELP, "info", variable=LEVEL_VARIABLE)

    def __post_init__(self) -> None:
        """Raise ValueError on a value out of range."""
        check_logging(self.log_format, self.log_level)
        check_bounds(self)
        numbers: dict[str, Any] = {"wait-s": self.wait_s, "idle-s": self.idle_s, "worker-rate": self.worker_rate}
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise ValueError(f"--{name} {value}: not a finite number")
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"--port {self.port}: not a port")
        self.rules()
        self.tls_files()

    def tls_files(self) -> TlsFiles | None:
        """Return the files of the port for KEDA, which then asks for KEDA's certificate. Raises ValueError."""
        return tls_of(self.tls_cert, self.tls_key, self.tls_ca)

    def bounds(self) -> dict[str, dict[str, Bounds]]:
        """Return the bounds of each model's workers by cell, whose name is empty for all cells. Raises ValueError."""
        bounds: dict[str, dict[str, Bounds]] = {}
        for text in self.pools.split(","):
            match = _POOL.fullmatch(text.strip())
            if match is None:
                raise ValueError(
                    f"--pools {text.strip()!r}: write MODEL=MIN-MAX, such as base=1-8, or MODEL@CELL=MIN-MAX"
                )
            model, cell, least, most = match[1], match[2] or "", int(match[3]), int(match[4])
            if most < max(1, least):
                raise ValueError(f"--pools {text.strip()}: the maximum must be at least 1 and the minimum")
            of_model = bounds.setdefault(model, {})
            if cell in of_model:
                raise ValueError(f"--pools {text.strip()}: {model}{'@' * bool(cell)}{cell} is named twice")
            of_model[cell] = Bounds(least, most)
            if len(of_model) > 1 and "" in of_model:
                raise ValueError(f"--pools {text.strip()}: name the cell in each pool of {model}, or in none")
        return bounds

    def rules(self) -> dict[str, PoolRules]:
        """Return the rules of each model's workers, in all cells together. Raises ValueError."""
        pace = self.wait_s, self.idle_s, self.worker_rate
        return {
            model: PoolRules(sum(one.least for one in cells.values()), sum(one.most for one in cells.values()), *pace)
            for model, cells in self.bounds().items()
        }
