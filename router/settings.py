"""The router's settings."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from broker.cells import CellAddress, parse_cells
from broker.job_keys import JOB_KEY_HELP
from broker.terms import QueueLimits
from router.generation.resume import KEY_CHARACTERS
from router.quotas.usage_sender import check_url
from rpc.principal import Role
from rpc.server import MESSAGE_BYTES
from rpc.settings import REDIS_URL_HELP, REDIS_URL_VARIABLE, check_bounds, check_installed, setting
from telemetry.logging import FORMAT_HELP, FORMAT_VARIABLE, LEVEL_HELP, LEVEL_VARIABLE, check_logging
from telemetry.metrics import PORT_HELP
from tenancy.access import AccessSettings
from tenancy.api_keys import STALE_S
from tenancy.audit_log import FILE_HELP
from tenancy.guard import is_loopback, is_tenant

# The engine protocol that is served, and the tenant of its calls that name none: that of the command.
SGLANG, DEFAULT_TENANT = "sglang", "default"
# Settings that each of several processes has for itself: ports, and files that it writes.
_OWN_PORTS = ("relay_port", "operator_port", "operator_mtls_port", "metrics_port")
_OWN_FILES = ("usage_file", "audit")


@dataclass(frozen=True)
class Settings(AccessSettings):
    """Routes Generate calls onto Redis queues and streams the workers' tokens back."""

    store: str = setting("the adapter store's address, HOST:PORT")
    redis_url: str = setting(REDIS_URL_HELP, variable=REDIS_URL_VARIABLE)
    store_away_s: float = setting(
        "seconds that API keys and adapters' names read before are used for while the store does not answer",
        STALE_S,
        above=0,
    )
    host: str = setting("the address to listen on for clients", "127.0.0.1")
    port: int = setting("the port to listen on for clients; 0: the system chooses", 50051)
    processes: int = setting("number of router processes that share the port (docs/guides/operating.md)", 1, least=1)
    relay_host: str = setting("the address to listen on for workers", "127.0.0.1")
    relay_port: int = setting("the port to listen on for workers; 0: the system chooses", 0)
    relay_advertise: str = setting("HOST that workers reach this router's relay at; empty: the relay host", "")
    cells: str = setting(
        "the cells of the queues, NAME or NAME=URL, with spaces between them; URL: the cell's own Redis "
        "(docs/guides/scaling.md)",
        "main",
    )
    waiting_limit: int = setting("maximum of jobs that wait in a model's queue, of each cell", 10_000, least=1)
    waiting_bytes: int = setting("maximum of bytes of these jobs", 1 << 30, least=1)
    open_calls_limit: int = setting("maximum of clients' open calls; a tenant gets a share of them", 8_192, least=1)
    open_bytes_limit: int = setting("maximum of bytes of their messages", 1 << 28, least=2 * MESSAGE_BYTES)
    usage_file: str = setting("a file that usage events are appended to (docs/guides/quotas.md); empty: none", "")
    usage_url: str = setting("an HTTP collector that the events of --usage-file are sent to; empty: none", "")
    adapter_mib_tokens: float = setting("prompt tokens that a MiB of an adapter's load is charged as", 10.0)
    client_stall_s: float = setting(
        "seconds that a client may read nothing; then its request is dropped", 10.0, above=0
    )
    drain_s: float = setting("seconds that running streams get when the router is told to stop", 5.0)
    job_key: str = setting(JOB_KEY_HELP, "")
    resume_key: str = setting(
        "a secret of all routers, with which streams are resumed at another; prefer the variable to the flag; "
        "empty: the one that the routers keep in Redis",
        "",
    )
    accepted_resume_keys: str = setting(
        "further resume keys whose tokens are accepted, with commas between them: former ones, or the next one", ""
    )
    generation_config: str = setting(
        "auto: what a request leaves unset of sampling and max_tokens is as in the model's generation_config.json; "
        "none: that file is not used, so an unset temperature is greedy",
        "auto",
    )
    default_max_tokens: int = setting(
        "maximum tokens of an answer whose request sets no max_tokens; 0: as the model, protocol and context say",
        0,
        least=0,
    )
    scale_from_zero: bool = setting(
        "take requests of a registered model without a worker: they wait in the queue, up to their deadline, for the "
        "one that an autoscaler starts (loraplex scaler); by default they are refused",
        False,
    )
    engine_protocol: str = setting(
        "a protocol for gateways that is served too: sglang (docs/reference/engine-protocol.md); empty: none", ""
    )
    engine_tenant: str = setting(
        "the tenant of its calls without one, such as those of gateways; not used with credentials", DEFAULT_TENANT
    )
    engine_adapter: str = setting("the adapter of its calls without lora_id; empty: the base model", "")
    metrics_port: int = setting(PORT_HELP, 0)
    log_format: str = setting(FORMAT_HELP, "text", variable=FORMAT_VARIABLE)
    log_level: str = setting(LEVEL_HELP, "info", variable=LEVEL_VARIABLE)
    audit: str = setting(FILE_HELP, "")
    insecure_tenants: bool = setting(
        "allow listening beyond this machine although any caller can name any tenant, and act as a worker",
        False,
    )

    def __post_init__(self) -> None:
        """Raise ValueError on a value out of range, or on an address that exposes tenants or that no worker reaches."""
        self.check_access(self.host, self.insecure_tenants)
        if (tls := self.tls_files()) is not None:
            from broker.job_keys import check_job_key
            from tenancy.certificates import own_name

            own_name(tls, Role.ROUTER)
            check_job_key(self.job_key)
        check_logging(self.log_format, self.log_level)
        if self.usage_url:
            check_url(self.usage_url)
            if not self.usage_file:
                raise ValueError("--usage-url: give --usage-file too, which the events are sent from")
        self._check_engine_protocol()
        if self.generation_config not in {"auto", "none"}:
            raise ValueError(f"--generation-config {self.generation_config}: give auto or none")
        check_bounds(self)
        parse_cells(self.cells)
        if self.processes > 1 and sys.platform != "linux":
            raise ValueError(f"--processes {self.processes}: only Linux spreads the connections to a shared port")
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
        if self.engine_protocol not in {"", SGLANG}:
            raise ValueError(f"--engine-protocol {self.engine_protocol}: only {SGLANG} is known")
        if self.engine_protocol:
            check_installed(f"--engine-protocol {SGLANG}", "smg_grpc_proto")
        if not is_tenant(self.engine_tenant):
            raise ValueError(f"--engine-tenant {self.engine_tenant!r}: not a tenant's name")

    def of_process(self, number: int) -> Settings:
        """Return the settings of one of several processes, whose numbers start at 1.

        The second has the next ports, where the first one's are not chosen by the system, and FILE is its `2-FILE`.
        """
        if number == 1:
            return self
        own: dict[str, Any] = {name: port + number - 1 for name in _OWN_PORTS if (port := getattr(self, name) or 0) > 0}
        files = {name: Path(path) for name in _OWN_FILES if (path := getattr(self, name))}
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
