"""The router's settings."""

from __future__ import annotations

from dataclasses import dataclass

from rpc.auth import check_exposure
from rpc.settings import REDIS_URL_HELP, REDIS_URL_VARIABLE, setting


@dataclass(frozen=True)
class Settings:
    """Routes Generate calls onto Redis queues and streams the workers' tokens back."""

    store: str = setting("the adapter store's address, HOST:PORT")
    redis_url: str = setting(REDIS_URL_HELP, variable=REDIS_URL_VARIABLE)
    host: str = setting("the address to listen on for clients", "127.0.0.1")
    port: int = setting("the port to listen on for clients; 0: the system chooses", 50051)
    relay_host: str = setting("the address to listen on for workers", "127.0.0.1")
    relay_port: int = setting("the port to listen on for workers; 0: the system chooses", 0)
    relay_advertise: str = setting("HOST that workers reach this router's relay at; empty: the relay host", "")
    cell: str = setting("the cell of the queue", "main")
    waiting_limit: int = setting("how many jobs may wait in the queue", 10_000)
    drain_s: float = setting("seconds that running streams get when the router is told to stop", 5.0)
    insecure_tenants: bool = setting(
        "allow listening beyond this machine although the tenant is taken from a header that anyone can write", False
    )

    def __post_init__(self) -> None:
        """Raises ValueError on an address that would expose the tenants, or that workers could not call back."""
        check_exposure(self.host, self.insecure_tenants)
        if not self.relay_advertise and self.relay_host in {"0.0.0.0", "::", "[::]"}:
            raise ValueError(
                f"--relay-host {self.relay_host}: no address that workers could call back; "
                "say with --relay-advertise under which host name they reach this router"
            )
