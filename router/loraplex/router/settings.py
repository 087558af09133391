"""The router's settings."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from loraplex.contracts.broker.cells import CellAddress, parse_cells
from loraplex.contracts.broker.job_keys import JOB_KEY_HELP
from loraplex.contracts.broker.terms import QueueLimits
from loraplex.router.generation.resume import KEY_CHARACTERS
from loraplex.runtime.rpc.principal import Role
from loraplex.runtime.rpc.server import MESSAGE_BYTES
from loraplex.runtime.rpc.settings import REDIS_URL_HELP, REDIS_URL_VARIABLE, check_bounds, check_installed, setting
from loraplex.runtime.telemetry.logging import FORMAT_HELP, FORMAT_VARIABLE, LEVEL_HELP, LEVEL_VARIABLE, check_logging
from loraplex.runtime.telemetry.metrics import PORT_HELP
from loraplex.runtime.tenancy.access import AccessSettings
from loraplex.runtime.tenancy.api_keys import STALE_S
from loraplex.runtime.tenancy.audit_log import FILE_HELP, OTLP, STDOUT
from loraplex.runtime.tenancy.guard import is_loopback, is_tenant

# Engine protocols, modules at the edge, with their classes; and the tenant of calls that name none: the command's.
ENGINE_PROTOCOLS = {"sglang": "SglangScheduler", "vllm": "VllmEngine"}
DEFAULT_TENANT = "default"
# The modules of usage events, and of content hooks, at the edge.
USAGE_EVENTS, USAGE_SENDER = "loraplex.usage_events.log", "loraplex.usage_events.sender"
CONTENT_HOOKS = "loraplex.content_hooks.hook"
# RouterSettings that each of several processes has for itself: ports, and files that it writes.
_OWN_PORTS = ("relay_port", "operator_port", "operator_mtls_port", "metrics_port")
_OWN_FILES = ("usage_file", "audit")


@dataclass(frozen=True)
class RouterSettings(AccessSettings):
    """Routes Generate calls onto Redis queues and streams the workers' tokens back."""

    store: str = setting("address of the adapter store, HOST:PORT")
    redis_url: str = setting(REDIS_URL_HELP, variable=REDIS_URL_VARIABLE)
    store_away_s: float = setting(
        "seconds that cached API keys and adapter names stay valid while the store does not answer",
        STALE_S,
        above=0,
    )
    host: str = setting("address to listen on", "127.0.0.1")
    port: int = setting("port to listen on; 0: any free port", 50051)
    processes: int = setting("router processes that share the port (docs/guides/operating.md)", 1, least=1)
    relay_host: str = setting("address to listen on for workers", "127.0.0.1")
    relay_port: int = setting("port to listen on for workers; 0: any free port", 0)
    relay_advertise: str = setting("host name or address at which workers reach the relay; empty: --relay-host", "")
    cells: str = setting(
        "cells of the queues, NAME or NAME=REDIS-URL, separated by spaces (docs/guides/scaling.md)",
        "main",
    )
    waiting_limit: int = setting("maximum waiting jobs in a model's queue, per cell", 10_000, least=1)
    waiting_bytes: int = setting("maximum bytes of the waiting jobs in a model's queue, per cell", 1 << 30, least=1)
    open_calls_limit: int = setting("maximum open calls; a tenant gets a share of them", 8_192, least=1)
    open_bytes_limit: int = setting("maximum bytes of open calls' requests", 1 << 28, least=2 * MESSAGE_BYTES)
    usage_file: str = setting("file that usage events are appended to (docs/guides/quotas.md)", "")
    usage_url: str = setting("HTTP collector that usage events are posted to; Redis keeps them until it takes them", "")
    content_hook: str = setting("gRPC service that checks prompts and answers (docs/guides/security.md)", "")
    adapter_mib_tokens: float = setting("prompt tokens charged per MiB of an adapter that is loaded", 10.0)
    client_stall_s: float = setting("seconds after which a client that reads nothing is disconnected", 10.0, above=0)
    drain_s: float = setting("seconds that running requests may take after SIGTERM", 5.0)
    job_key: str = setting(JOB_KEY_HELP, "")
    resume_key: str = setting(
        "secret that signs resume tokens, the same for all routers; prefer the variable; empty: one in Redis",
        "",
    )
    accepted_resume_keys: str = setting("other resume keys to accept, separated by commas", "")
    generation_config: str = setting(
        "auto: take unset sampling fields and max_tokens from the model's generation_config.json; none: do not",
        "auto",
    )
    default_max_tokens: int = setting(
        "maximum tokens of an answer whose request sets no max_tokens; 0: no maximum",
        0,
        least=0,
    )
    scale_from_zero: bool = setting(
        "queue requests of a model without workers until an autoscaler starts one, instead of refusing them",
        False,
    )
    engine_protocol: str = setting("also serve engine protocols: sglang, vllm (docs/reference/engine-protocol.md)", "")
    engine_tenant: str = setting("tenant of the engine protocol's calls without credentials", DEFAULT_TENANT)
    engine_adapter: str = setting("adapter of the engine protocol's calls without lora_id; empty: the base model", "")
    metrics_port: int = setting(PORT_HELP, 0)
    log_format: str = setting(FORMAT_HELP, "text", variable=FORMAT_VARIABLE)
    log_level: str = setting(LEVEL_HELP, "info", variable=LEVEL_VARIABLE)
    audit: str = setting(FILE_HELP, "")
    insecure_tenants: bool = setting(
        "listen beyond this machine without credentials, although callers can then act as any tenant",
        False,
    )

    def __post_init__(self) -> None:
        """Raise ValueError on a value out of range, or on an address that exposes tenants or that no worker reaches."""
        self.check_access(self.host, self.insecure_tenants)
        if (tls := self.tls_files()) is not None:
            from loraplex.contracts.broker.job_keys import check_job_key
            from loraplex.runtime.tenancy.certificates import own_name

            own_name(tls, Role.ROUTER)
            check_job_key(self.job_key)
        check_logging(self.log_format, self.log_level)
        if self.usage_url:
            import_module(USAGE_SENDER).check_url(self.usage_url)
        if self.content_hook:
            import_module(CONTENT_HOOKS).read_hook(self.content_hook, tls)
        self._check_engine_protocol()
        if self.generation_config not in {"auto", "none"}:
            raise ValueError(f"--generation-config {self.generation_config}: give auto or none")
        check_bounds(self)
        parse_cells(self.cells)
        if self.processes > 1 and sys.platform != "linux":
            raise ValueError(f"--processes {self.processes}: only Linux spreads the connections to a shared port")
        if self.processes > 1 and self.audit == STDOUT:
            raise ValueError("--audit -: each process has a log of its own, which one output would mix; give a file")
        if not 0 <= self.adapter_mib_tokens < math.inf:
            raise ValueError(f"--adapter-mib-tokens {self.adapter_mib_tokens}: 0 or more")
        _check_keys("--resume-key", [self.resume_key] if self.resume_key else [])
        _check_keys("--accepted-resume-keys", self.former_keys)
        _check_relay(self.relay_host, self.relay_advertise)
        if tls is None and not self.insecure_tenants and not is_loopback(self.relay_host):
            raise ValueError(
                f"--relay-host {self.relay_host}: whoever reaches it beyond this machine could answer as a worker; "
                "listen on 127.0.0.1, turn credentials on with --tls-cert, or accept that with --insecure-tenants"
            )

    def _check_engine_protocol(self) -> None:
        if unknown := sorted({*filter(None, self.engine_protocol.split(","))} - ENGINE_PROTOCOLS.keys()):
            raise ValueError(f"--engine-protocol {unknown[0]}: only {', '.join(ENGINE_PROTOCOLS)} are known")
        if self.engine_protocol:
            check_installed(f"--engine-protocol {self.engine_protocol}", "smg_grpc_proto")
        if not is_tenant(self.engine_tenant):
            raise ValueError(f"--engine-tenant {self.engine_tenant!r}: not a tenant's name")

    def of_process(self, number: int) -> RouterSettings:
        """Return the settings of one of several processes, whose numbers start at 1.

        The second has the next ports, where the first one's are not chosen by the system, and FILE is its `2-FILE`.
        """
        if number == 1:
            return self
        own: dict[str, Any] = {name: port + number - 1 for name in _OWN_PORTS if (port := getattr(self, name) or 0) > 0}
        files = {name: Path(path) for name in _OWN_FILES if (path := getattr(self, name)) not in {"", OTLP}}
        own |= {name: str(path.with_name(f"{number}-{path.name}")) for name, path in files.items()}
        return replace(self, **own)

    @property
    def relay_name(self) -> str:
        """Return the host under which workers reach the relay."""
        return self.relay_advertise or self.relay_host

    @property
    def former_keys(self) -> list[str]:
        """Return the further resume keys whose tokens are accepted."""
        return self.accepted_resume_keys.split(",") if self.accepted_resume_keys else []

    @property
    def cell_addresses(self) -> tuple[CellAddress, ...]:
        """Return the cells, with the URLs of those that have a Redis of their own."""
        return parse_cells(self.cells)

    @property
    def queue_limits(self) -> QueueLimits:
        """Return the limits of a model's queue."""
        return QueueLimits(self.waiting_limit, self.waiting_bytes)


def _check_relay(host: str, advertised: str) -> None:
    """Raise ValueError on an address of the relay that workers can't call."""
    every = {"0.0.0.0", "::", "[::]"}
    if not advertised and host in every:
        raise ValueError(
            f"--relay-host {host}: no address that workers could call back; "
            "say with --relay-advertise under which host name they reach this router"
        )
    if advertised in every:
        raise ValueError(f"--relay-advertise {advertised}: no address that workers could call back")
    if ":" in advertised and not (advertised.startswith("[") and advertised.endswith("]")):
        raise ValueError(
            f"--relay-advertise {advertised}: write HOST, or an IPv6 address in brackets; --relay-port sets the port"
        )


def _check_keys(flag: str, keys: list[str]) -> None:
    for key in keys:  # the message must not show it
        if len(key) < KEY_CHARACTERS:
            raise ValueError(f"{flag}: a key of {len(key)} characters; at least {KEY_CHARACTERS}")
