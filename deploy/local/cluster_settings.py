"""The settings of a local cluster, the flags of its workers, and the check of its ports."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from rpc.children.process import LaunchError


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of a local cluster. Port 0 lets the system choose; only the first router gets `port`."""

    # A transformers directory, or `hash:?...`.
    model: str
    model_name: str = ""
    workers: int = 1
    routers: int = 1
    host: str = "127.0.0.1"
    port: int = 50051
    store_port: int = 50052
    # The gateway's port; None for no gateway.
    http_port: int | None = None
    device: str = "cpu"
    dtype: str = "auto"
    # The scheme of the weights, such as int8; empty: as the files are.
    quantize: str = ""
    # The KV cache's dtype, int8; empty: that in which the model computes.
    kv_cache_dtype: str = ""
    # URL of a Redis; empty for an embedded Valkey.
    redis_url: str = ""
    # Directory of logs, adapters and caches; None for a temporary one.
    data_dir: Path | None = None
    # Flags of every worker, of every router and of the store, after the launcher's own.
    worker_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    store_flags: tuple[str, ...] = ()

    def flags_of_worker(self) -> list[str]:
        """Return the flags that every worker has."""
        flags = ["--model", self.model, "--model-name", self.model_name, "--device", self.device, "--dtype", self.dtype]
        flags += ["--quantize", self.quantize] if self.quantize else []
        flags += ["--kv-cache-dtype", self.kv_cache_dtype] if self.kv_cache_dtype else []
        if self.device == "cpu" and self.workers > 1:  # Engines that each use every core slow each other down.
            flags += ["--threads", str(max(1, _cores() // self.workers))]
        return [*flags, *self.worker_flags]

    def check_ports(self) -> None:
        """Check that the requested ports are free, before anything is started. Raises LaunchError."""
        asked = {"--port": self.port, "--store-port": self.store_port}
        if self.http_port is not None:
            asked["--http"] = self.http_port
        for flag, port in asked.items():
            with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self.host, port))
                except (OSError, OverflowError) as error:
                    why = (getattr(error, "strerror", None) or "not a port").lower()
                    raise LaunchError(
                        f"cannot listen on {self.host}:{port}: {why}; "
                        f"choose another port with {flag}, or 0 for any free one"
                    ) from error
            first = next(other for other in asked if asked[other] == port)
            if port and first != flag:
                raise LaunchError(f"{first} and {flag} are both {port}: choose two ports")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
