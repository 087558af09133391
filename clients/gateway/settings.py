"""The gateway's settings."""

from __future__ import annotations

from dataclasses import dataclass

from clients.gateway.turns import KEPT_S
from rpc.settings import check_bounds, setting
from telemetry.logging import FORMAT_HELP, FORMAT_VARIABLE, LEVEL_HELP, LEVEL_VARIABLE, check_logging
from telemetry.metrics import PORT_HELP
from tenancy.guard import check_exposure, is_loopback

_ROUTER, _STORE, _CA = "LORAPLEX_ADDRESS", "LORAPLEX_STORE_ADDRESS", "LORAPLEX_CA"


@dataclass(frozen=True)
class GatewaySettings:
    """Serves the HTTP protocols of OpenAI, Anthropic, and LoRAX and TGI, as a client of routers."""

    router: str = setting(
        f"the routers' addresses, HOST:PORT with commas between them; also {_ROUTER}",
        "127.0.0.1:50051",
        variable=_ROUTER,
    )
    store: str = setting(
        "the adapter store's address, so that /v1/models lists a tenant's adapters, and /v1/adapters takes them; "
        f"empty: neither; also {_STORE}",
        "",
        variable=_STORE,
    )
    ca: str = setting(
        "TLS to routers and store, which then get each caller's API key: the file with the authority that signs their "
        f"certificates, or `system`; also {_CA}",
        "",
        variable=_CA,
    )
    operator_router: str = setting(
        "with --ca: the addresses of the routers' --operator-port, HOST:PORT with commas between them, so that the "
        "page shows the cluster to an operator's key; empty: it does not",
        "",
    )
    host: str = setting("the address to listen on", "127.0.0.1")
    host_names: str = setting(
        "without --ca: names that requests may be sent to, with commas between them, besides localhost and addresses; "
        "a page of another site may have sent others. Empty: any, if --host is beyond this machine",
        "",
    )
    port: int = setting("the port to listen on; 0: the system chooses", 8000)
    tls_cert: str = setting("PEM file with the gateway's own certificate: it then speaks HTTPS; with --tls-key", "")
    tls_key: str = setting("PEM file with the certificate's private key", "")
    connections_limit: int = setting("maximum of open connections; an address gets half of them", 10_000, least=1)
    requests_limit: int = setting("maximum of requests that run at once; a caller gets a share of them", 8_192, least=1)
    client_stall_s: float = setting(
        "seconds that a client may leave an answer unread; then its connection is closed", 15.0, above=0
    )
    responses_kept_s: float = setting(
        "seconds that an answer of /v1/responses is remembered for `previous_response_id`, in this process's memory; "
        "0: it is not",
        KEPT_S,
        least=0,
    )
    drain_s: float = setting("seconds that running answers get when the gateway is told to stop", 5.0)
    metrics_port: int = setting(PORT_HELP, 0)
    log_format: str = setting(FORMAT_HELP, "text", variable=FORMAT_VARIABLE)
    log_level: str = setting(LEVEL_HELP, "info", variable=LEVEL_VARIABLE)
    insecure_tenants: bool = setting(
        "allow listening beyond this machine although any caller can name any tenant", False
    )
    insecure_http: bool = setting(
        "allow listening beyond this machine although API keys come in clear, as behind a proxy that ends TLS", False
    )

    def __post_init__(self) -> None:
        """Raise ValueError on a value out of range, or on an address that exposes tenants or keys."""
        check_logging(self.log_format, self.log_level)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("--tls-cert, --tls-key: give both, or neither")
        if not self.ca:
            check_exposure(self.host, self.insecure_tenants)
        elif not (self.tls_cert or self.insecure_http or is_loopback(self.host)):
            raise ValueError(
                f"--host {self.host}: API keys would cross the network in clear; give --tls-cert and --tls-key, or "
                "accept that with --insecure-http behind a proxy that ends TLS"
            )
        if self.operator_router and not self.ca:
            raise ValueError(
                f"--operator-router {self.operator_router}: needs --ca; routers without credentials have one port"
            )
        for name in self.host_names.split(","):
            if "/" in name or name.count(":") == 1:  # more of them are in an IPv6 address
                raise ValueError(f"--host-names {name.strip()}: a name alone, without https:// and without a port")
        check_bounds(self)
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"--port {self.port}: not a port")
