"""The runner's settings."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.runtime.rpc.settings import check_bounds, setting
from loraplex.runtime.rpc.tls import CA_HELP, CERT_HELP, KEY_HELP, tls_of
from loraplex.runtime.telemetry.logging import FORMAT_HELP, FORMAT_VARIABLE, LEVEL_HELP, LEVEL_VARIABLE, check_logging
from loraplex.runtime.telemetry.metrics import PORT_HELP
from loraplex_client import Tls

_ROUTER, _STORE = "LORAPLEX_ADDRESS", "LORAPLEX_STORE_ADDRESS"


@dataclass(frozen=True)
class RunnerSettings:
    """Runs the batches that tenants have made at the store, at the lowest priority."""

    router: str = setting(
        f"addresses of the routers, with credentials those of --operator-mtls-port; also {_ROUTER}",
        "127.0.0.1:50051",
        variable=_ROUTER,
    )
    store: str = setting(
        f"address of the store, with credentials that of --operator-mtls-port; also {_STORE}",
        "127.0.0.1:50052",
        variable=_STORE,
    )
    lines_at_once: int = setting("maximum lines of a batch that run at the same time", 32, least=1)
    slowdown: float = setting(
        "fewer lines run at once where a token takes so many times as long as with few lines", 1.1, above=1
    )
    batches_at_once: int = setting("maximum batches that run at the same time; further ones wait", 8, least=1)
    drain_s: float = setting("seconds that running lines may take after SIGTERM", 5.0, least=0)
    tls_cert: str = setting(CERT_HELP, "")
    tls_key: str = setting(KEY_HELP, "")
    tls_ca: str = setting(CA_HELP, "")
    host: str = setting("address of the metrics", "127.0.0.1")
    metrics_port: int = setting(PORT_HELP, 0)
    log_format: str = setting(FORMAT_HELP, "text", variable=FORMAT_VARIABLE)
    log_level: str = setting(LEVEL_HELP, "info", variable=LEVEL_VARIABLE)

    def __post_init__(self) -> None:
        """Raise ValueError on a value out of range, or on certificate files that cannot be used."""
        check_logging(self.log_format, self.log_level)
        check_bounds(self)
        tls_of(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def tls(self) -> Tls | None:
        """Return the certificate files of a client; None without credentials."""
        return Tls(self.tls_ca, self.tls_cert, self.tls_key) if self.tls_cert else None
