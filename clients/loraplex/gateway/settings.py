"""The gateway's settings."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.gateway.turns import KEPT_S
from loraplex.runtime.rpc.settings import check_bounds, setting
from loraplex.runtime.telemetry.logging import FORMAT_HELP, FORMAT_VARIABLE, LEVEL_HELP, LEVEL_VARIABLE, check_logging
from loraplex.runtime.telemetry.metrics import PORT_HELP
from loraplex.runtime.tenancy.guard import check_exposure, is_loopback

_ROUTER, _STORE, _CA = "LORAPLEX_ADDRESS", "LORAPLEX_STORE_ADDRESS", "LORAPLEX_CA"


@dataclass(frozen=True)
class GatewaySettings:
    """Serves the HTTP protocols of OpenAI, Anthropic, and LoRAX and TGI, as a client of routers."""

    router: str = setting(
        f"addresses of the routers, HOST:PORT, separated by commas; also {_ROUTER}",
        "127.0.0.1:50051",
        variable=_ROUTER,
    )
    store: str = setting(
        f"address of the adapter store, for /v1/adapters and the adapters in /v1/models; also {_STORE}",
        "",
        variable=_STORE,
    )
    ca: str = setting(
        f"file with the authority of the cluster's certificates, or `system`; turns on TLS and API keys; also {_CA}",
        "",
        variable=_CA,
    )
    operator_router: str = setting(
        "with --ca: addresses of the routers' --operator-port, for the page's view of the cluster",
        "",
    )
    operator_store: str = setting("with --ca: address of the store's --operator-port, for all tenants' usage", "")
    jwt_issuers: str = setting("file of the issuers whose tokens (JWT) are accepted, and of their rules", "")
    page_url: str = setting(
        "with --jwt-issuers: address of the page in browsers, https://HOST, where people sign in at issuers", ""
    )
    session_key: str = setting("with --page-url: file of keys that encrypt sessions, one a line, newest first", "")
    host: str = setting("address to listen on", "127.0.0.1")
    host_names: str = setting(
        "without --ca: further accepted Host names, separated by commas; empty: any, beyond this machine",
        "",
    )
    port: int = setting("port to listen on; 0: any free port", 8000)
    tls_cert: str = setting("PEM file with the gateway's certificate, for HTTPS; with --tls-key", "")
    tls_key: str = setting("PEM file with the certificate's private key", "")
    requests_limit: int = setting("maximum requests at once; a caller gets a share of them", 8_192, least=1)
    responses_kept_s: float = setting(
        "seconds that answers of /v1/responses are kept in memory for `previous_response_id`; 0: not at all",
        KEPT_S,
        least=0,
    )
    logprobs_mode: str = setting(
        "raw_logprobs, or processed_logprobs: the default of `logprobs_mode` in requests", "raw_logprobs"
    )
    drain_s: float = setting("seconds that running requests may take after SIGTERM", 5.0)
    metrics_port: int = setting(PORT_HELP, 0)
    log_format: str = setting(FORMAT_HELP, "text", variable=FORMAT_VARIABLE)
    log_level: str = setting(LEVEL_HELP, "info", variable=LEVEL_VARIABLE)
    insecure_tenants: bool = setting(
        "listen beyond this machine without credentials, although callers can then act as any tenant", False
    )
    insecure_http: bool = setting("listen beyond this machine without HTTPS, as behind a proxy that ends TLS", False)

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
        if self.operator_store and not self.ca:
            raise ValueError(f"--operator-store {self.operator_store}: needs --ca; without it --store is the one port")
        if self.logprobs_mode not in {"raw_logprobs", "processed_logprobs"}:
            raise ValueError(f"--logprobs-mode {self.logprobs_mode}: raw_logprobs or processed_logprobs")
        signing_in = (self.jwt_issuers, self.page_url, self.session_key)
        if any(signing_in) and not all((*signing_in, self.ca)):
            raise ValueError("--jwt-issuers, --page-url, --session-key: give all three, with --ca, or none")
        for name in self.host_names.split(","):
            if "/" in name or name.count(":") == 1:  # more of them are in an IPv6 address
                raise ValueError(f"--host-names {name.strip()}: a name alone, without https:// and without a port")
        check_bounds(self)
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"--port {self.port}: not a port")
